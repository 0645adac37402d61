// Streams and events of the stand-in for CUDA.
//
// Answers: the order of a stream; that nothing but events and waits orders streams, and that the host runs ahead;
// priorities as numbers; the implicit order between the legacy default stream and streams that are not made with
// cudaStreamNonBlocking; times between events; destruction of a stream or an event that is still needed.
// Cannot: graphs and capture (refused by name), the per-thread default stream (it is the legacy one), what priorities
// do.
//
// A stream is a queue. A thread of a pool has it while kernels are at its head; events and waits are dealt with by
// whoever finds them there. So as many threads exist as streams have had kernels to run at once, POOL at least.
#include "device.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <set>
#include <thread>
#include <utility>

namespace fakecuda {
namespace {

constexpr int POOL = 4;

struct Thread {
  bool is_told = false;
  std::condition_variable told;
};

struct Event {
  unsigned flags = 0;
  std::shared_ptr<Mark> mark;
};

struct State {
  std::mutex lock;
  std::set<Stream*> streams;
  std::map<int, Stream*> defaults;
  std::deque<Stream*> turns;  // something may have changed for them
  std::deque<Stream*> ready;  // a kernel is at their head, and no thread has them yet
  std::vector<Thread*> idle;  // the one that became idle last is used first: its caches are warm, and others never wake
  int threads = 0;
  int occupied = 0;  // threads that have a stream
  int running = 0;  // functions, not threads
  int ordered = 0;  // streams that the default stream waits for
  unsigned long ids = 0;
  std::atomic<bool> closing{false};
  std::condition_variable quiet;
};

State& state() {
  static auto* one = new State;  // leaked: threads use it until the process is gone
  return *one;
}

using Guard = std::unique_lock<std::mutex>;

void settle(Stream*);

void run_kernels(Stream* stream, Guard& guard) {
  while (!stream->queue.empty() && stream->queue.front().run && !state().closing) {
    auto run = std::move(stream->queue.front().run);
    stream->queue.pop_front();
    state().running++;
    guard.unlock();
    run();
    run = nullptr;
    guard.lock();
    if (--state().running == 0) state().quiet.notify_all();
  }
}

void live(Thread* self) {
  pthread_setname_np(pthread_self(), "fakecuda");
  Guard guard(state().lock);
  for (;;) {
    while (!state().ready.empty() && !state().closing) {
      auto* stream = state().ready.front();
      state().ready.pop_front();
      state().occupied++;
      run_kernels(stream, guard);
      state().occupied--;
      if (!state().closing) settle(stream);
    }
    self->is_told = false;
    state().idle.push_back(self);
    self->told.wait(guard, [self] { return self->is_told; });
  }
}

// A thread that is neither occupied nor idle is about to look at what is ready.
void give_to_a_thread(Stream* stream) {
  state().ready.push_back(stream);
  while (state().threads < POOL || static_cast<int>(state().ready.size()) > state().threads - state().occupied) {
    state().threads++;
    std::thread(live, new Thread).detach();
  }
  if (state().idle.empty()) return;
  auto* thread = state().idle.back();
  state().idle.pop_back();
  thread->is_told = true;
  thread->told.notify_one();
}

// Deals with events and waits at the stream's head, and with what other streams may do because of that.
void settle(Stream* first) {
  state().turns.push_back(first);
  while (!state().turns.empty()) {
    auto* stream = state().turns.front();
    state().turns.pop_front();
    bool goes_on = true;
    while (goes_on && !stream->queue.empty()) {
      if (stream->queue.front().run) {
        give_to_a_thread(stream);
        goes_on = false;
        continue;
      }
      auto item = std::move(stream->queue.front());
      stream->queue.pop_front();
      if (item.reach) {
        item.reach->done = true;
        item.reach->at = std::chrono::steady_clock::now();
        item.reach->reached.notify_all();
        for (auto* other : std::exchange(item.reach->parked, {})) state().turns.push_back(other);
      } else if (!item.await->done) {
        item.await->parked.push_back(stream);
        goes_on = false;
      }
    }
    if (!goes_on) continue;
    stream->scheduled = false;
    if (stream->dying) delete stream;
  }
}

void push(Stream* stream, Stream::Item item) {
  stream->queue.push_back(std::move(item));
  if (!std::exchange(stream->scheduled, true)) settle(stream);
}

std::shared_ptr<Mark> mark_end(Stream* stream) {
  auto mark = std::make_shared<Mark>();
  push(stream, {nullptr, nullptr, mark});
  return mark;
}

void await_end(Stream* stream, Stream* of) {
  if (of != stream && of->scheduled) push(stream, {nullptr, mark_end(of), nullptr});
}

// Items of the legacy default stream wait for those of all streams that are not non-blocking, and the reverse.
void push_in_order(Stream* stream, Stream::Item item) {
  if (state().ordered && stream->is_default) {
    for (auto* other : state().streams)
      if (other->device == stream->device && !(other->flags & cudaStreamNonBlocking)) await_end(stream, other);
  } else if (!stream->is_default && !(stream->flags & cudaStreamNonBlocking)) {
    auto found = state().defaults.find(stream->device);
    if (found != state().defaults.end()) await_end(stream, found->second);
  }
  push(stream, std::move(item));
}

Stream* made(unsigned flags, int priority, bool is_default) {
  auto* stream = new Stream;
  stream->device = current_device();
  stream->flags = flags;
  stream->priority = priority;
  stream->is_default = is_default;
  stream->id = state().ids++;
  state().streams.insert(stream);
  state().ordered += !is_default && !(flags & cudaStreamNonBlocking);
  return stream;
}

void wait_for(const std::shared_ptr<Mark>& mark, Guard& guard) {
  mark->reached.wait(guard, [&] { return mark->done || state().closing; });
}

}  // namespace

std::mutex& lock() { return state().lock; }

int threads() {
  Guard guard(state().lock);
  return state().threads;
}

Stream* stream_of(cudaStream_t handle) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) return reinterpret_cast<Stream*>(handle);
  Guard guard(state().lock);
  auto& stream = state().defaults[current_device()];
  if (!stream) stream = made(0, 0, true);
  return stream;
}

std::vector<Stream*> streams_of(int device) {
  Guard guard(state().lock);
  std::vector<Stream*> found;
  for (auto* stream : state().streams)
    if (stream->device == device) found.push_back(stream);
  return found;
}

void put(Stream* stream, std::function<void()> run) {
  Guard guard(state().lock);
  push_in_order(stream, {std::move(run), nullptr, nullptr});
}

void wait(Stream* stream) {
  Guard guard(state().lock);
  if (stream->scheduled) wait_for(mark_end(stream), guard);
}

void wait_for_device(int device) {
  Guard guard(state().lock);
  std::vector<std::shared_ptr<Mark>> marks;
  for (auto* stream : state().streams)
    if (stream->device == device && stream->scheduled) marks.push_back(mark_end(stream));
  for (auto& mark : marks) wait_for(mark, guard);
}

// At the process's end no kernel may run any more: what it uses is about to be destroyed. One that ignores
// fakecuda_broken() for longer than this is left behind.
void close_streams() {
  Guard guard(state().lock);
  state().closing = true;
  state().quiet.wait_for(guard, std::chrono::seconds(5), [] { return state().running == 0; });
}

bool is_closing() { return state().closing; }

}  // namespace fakecuda

using namespace fakecuda;

extern "C" {

void fakecuda_enqueue(cudaStream_t handle, void (*f)(void*), void* argument) {
  put_kernel(stream_of(handle), [f, argument] { f(argument); });
}

int fakecuda_wait(cudaStream_t handle) {
  auto* stream = stream_of(handle);
  COUNT(stream, form_waits);
  wait(stream);
  return refused();
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  ALIVE;
  Guard guard(lock());
  *handle = reinterpret_cast<cudaStream_t>(made(flags, priority, false));
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

// Returns at once; what is on the stream is still done.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  ALIVE;
  auto* stream = stream_of(handle);
  Guard guard(lock());
  state().streams.erase(stream);
  state().ordered -= !(stream->flags & cudaStreamNonBlocking);
  stream->dying = true;
  if (!stream->scheduled) delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  ALIVE;
  COUNT(stream_of(handle), stream_waits);
  wait(stream_of(handle));
  return fail(refused());
}

cudaError_t cudaDeviceSynchronize() {
  ALIVE;
  counts().device_waits++;
  wait_for_device(current_device());
  return fail(refused());
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ALIVE;
  auto* stream = stream_of(handle);
  COUNT(stream, stream_queries);
  Guard guard(lock());
  return stream->scheduled ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  ENTER;
  *priority = stream_of(handle)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  ENTER;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
    const cudaGraphEdgeData**, size_t* count) {
  ENTER;
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  ENTER;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t f, void* argument) {
  ALIVE;
  auto* stream = stream_of(handle);
  COUNT(stream, host_functions);
  put(stream, [=] {
    if (!fakecuda_broken()) f(argument);
  });
  return cudaSuccess;
}

// Unlike cudaLaunchHostFunc's, its function is called in a dead context, too, and told the error.
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t f, void* argument, unsigned) {
  ALIVE;
  auto* stream = stream_of(handle);
  COUNT(stream, host_functions);
  put(stream, [=] { f(handle, static_cast<cudaError_t>(fakecuda_broken()), argument); });
  return cudaSuccess;
}

// Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  ALIVE;
  auto* event = new Event;
  event->flags = flags;
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, cudaEventDefault); }

// Whoever waits for it goes on waiting: the mark outlives the event.
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  ENTER;
  delete reinterpret_cast<Event*>(handle);
  return fail(refused());
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  ALIVE;
  auto* stream = stream_of(on);
  COUNT(stream, events_recorded);
  Guard guard(lock());
  auto mark = std::make_shared<Mark>();
  reinterpret_cast<Event*>(handle)->mark = mark;
  push_in_order(stream, {nullptr, nullptr, mark});
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) { return cudaEventRecordWithFlags(handle, on, 0); }

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  ALIVE;
  counts().event_queries++;
  Guard guard(lock());
  auto& mark = reinterpret_cast<Event*>(handle)->mark;
  return !mark || mark->done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  ALIVE;
  counts().event_waits++;
  {
    Guard guard(lock());
    auto mark = reinterpret_cast<Event*>(handle)->mark;
    if (mark) wait_for(mark, guard);
  }
  return fail(refused());
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  ALIVE;
  auto *first = reinterpret_cast<Event*>(from), *second = reinterpret_cast<Event*>(to);
  Guard guard(lock());
  bool timed = !((first->flags | second->flags) & cudaEventDisableTiming);
  if (!timed || !first->mark || !second->mark) return fail(cudaErrorInvalidResourceHandle);
  if (!first->mark->done || !second->mark->done) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(second->mark->at - first->mark->at).count();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  ALIVE;
  auto* stream = stream_of(handle);
  COUNT(stream, events_awaited);
  Guard guard(lock());
  auto& mark = reinterpret_cast<Event*>(event)->mark;
  if (mark && !mark->done) push_in_order(stream, {nullptr, mark, nullptr});
  return cudaSuccess;
}

}  // extern "C"
