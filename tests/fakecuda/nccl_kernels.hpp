// Kernels of the stand-in for NCCL: what runs on a stream's thread (nccl.cpp has the head, and the order of reductions).
#pragma once

#include "nccl_communicator.hpp"

extern "C" void fakecuda_enqueue(cudaStream_t stream, void (*run)(void*), void* argument);

namespace fakenccl {

enum class Kind { ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, SEND, RECEIVE };

struct Operation {
  Kind kind;
  ncclComm* comm;
  cudaStream_t stream;
  const char* from;
  char* to;
  size_t count;
  ncclDataType_t type;
  int peer;                                   // or root
  Reduction reduction;

  size_t bytes() const { return count * size_of(type); }
  Lane lane() const { return kind == Kind::SEND || kind == Kind::RECEIVE ? PAIR : RING; }
};

constexpr size_t CHUNK_BYTES = 1 << 19;
constexpr int EVERY = -1;                     // instead of a root

// One kernel: a communicator's part of a group. Every method returns false once the kernel has to end.
class Kernel {
 public:
  Kernel(ncclComm* comm, std::vector<Operation> operations) : comm_(comm), operations_(std::move(operations)) {}

  void run() {
    if (comm_->interrupt.over()) return;
    if (int ordered = fail_on_stream.take()) comm_->fail((ncclResult_t)ordered);
    if (comm_->error) {
      spin();
      return;
    }
    for (auto& operation : operations_)
      if (operation.lane() == RING && !collective(operation)) return;
    exchange();
  }

 private:
  // What a kernel does whose peer is gone: it polls flags that nobody will set, until the abort.
  bool spin() {
    while (rest(comm_->interrupt, 1 << 30)) continue;
    return false;
  }
  bool lost(const std::string& why) {
    if (comm_->interrupt.over()) return false;
    failed(ncclRemoteError, why);
    comm_->fail(ncclRemoteError);
    return spin();
  }
  bool has_said_goodbye(int descriptor) {
    char last = 0;
    return recv(descriptor, &last, 1, MSG_PEEK | MSG_DONTWAIT) == 1 && last == GOODBYE;
  }

  // ---- around the ring

  int next() const { return (comm_->rank + 1) % comm_->ranks; }
  int previous() const { return (comm_->rank - 1 + comm_->ranks) % comm_->ranks; }
  bool send_on(const void* data, size_t bytes) {
    int descriptor = comm_->out[{next(), RING}];
    ncclResult_t result = send_all(descriptor, data, bytes, comm_->interrupt);
    return result == ncclSuccess || lost("rank " + std::to_string(next()) + " is gone");
  }
  // Receives; meanwhile notices, too, if the next one dies: a ring of NCCL's always has something under way to it.
  bool take(void* data, size_t bytes) {
    int in = comm_->in[{previous(), RING}], out = comm_->out[{next(), RING}];
    for (char* to = (char*)data; bytes;) {
      ssize_t received = recv(in, to, bytes, MSG_DONTWAIT);
      if (received > 0) {
        to += received, bytes -= (size_t)received;
        continue;
      }
      if (received == 0 || (errno != EAGAIN && errno != EINTR)) return lost("rank " + std::to_string(previous()) + " is gone");
      std::vector<pollfd> both{{in, POLLIN, 0}};
      if (out >= 0) both.push_back({out, POLLRDHUP, 0});
      if (!await(both, comm_->interrupt)) return false;
      if (out < 0 || both[0].revents || !both[1].revents) continue;
      if (!has_said_goodbye(out)) return lost("rank " + std::to_string(next()) + " is gone");
      out = -1;
    }
    return true;
  }

  // Adds up in the order of ranks, 0 to the last; the last rank's total goes on around the ring to the root, or to all.
  bool reduce(const Operation& o, const char* from, char* to, int root) {
    size_t size = size_of(o.type), step = CHUNK_BYTES / size;
    int last = comm_->ranks - 1, end = root == EVERY ? last - 1 : root;
    std::vector<char> own(CHUNK_BYTES), total(CHUNK_BYTES);
    for (size_t done = 0; done < o.count; done += step) {
      if (!hold(silent, comm_->interrupt)) return false;
      size_t n = std::min(step, o.count - done), bytes = n * size;
      memcpy(own.data(), from + done * size, bytes);
      if (o.reduction.scaled) scale(o.type, own.data(), n, o.reduction);
      if (comm_->rank == 0) {
        total.swap(own);
      } else {
        if (!take(total.data(), bytes)) return false;
        accumulate(o.type, total.data(), own.data(), n, o.reduction);
      }
      if (comm_->rank == last) {
        if (o.reduction.divisor > 1) divide(o.type, total.data(), n, o.reduction.divisor);
      } else {
        if (!send_on(total.data(), bytes)) return false;
        if (comm_->rank <= end || root == EVERY)
          if (root != last && !take(total.data(), bytes)) return false;
      }
      if (root == EVERY || root == comm_->rank) memcpy(to + done * size, total.data(), bytes);
      bool passes_on = root != last && end >= 0 && (comm_->rank == last || comm_->rank < end);
      if (passes_on && !send_on(total.data(), bytes)) return false;
    }
    return true;
  }
  bool broadcast(size_t bytes, const char* from, char* to, int root) {
    if (comm_->rank == root && from != to) memmove(to, from, bytes);
    for (size_t done = 0; done < bytes; done += CHUNK_BYTES) {
      if (!hold(silent, comm_->interrupt)) return false;
      size_t n = std::min(CHUNK_BYTES, bytes - done);
      if (comm_->rank != root && !take(to + done, n)) return false;
      if (next() != root && !send_on(to + done, n)) return false;
    }
    return true;
  }
  bool collective(const Operation& o) {
    size_t bytes = o.bytes();
    switch (o.kind) {
      case Kind::ALL_REDUCE: return reduce(o, o.from, o.to, EVERY);
      case Kind::REDUCE: return reduce(o, o.from, o.to, o.peer);
      case Kind::BROADCAST: return broadcast(bytes, o.from, o.to, o.peer);
      case Kind::REDUCE_SCATTER:
        for (int r = 0; r < comm_->ranks; r++)
          if (!reduce(o, o.from + r * bytes, o.to, r)) return false;
        return true;
      default:
        for (int r = 0; r < comm_->ranks; r++)
          if (!broadcast(bytes, o.from, o.to + r * bytes, r)) return false;
        return true;
    }
  }

  // ---- between pairs: all at once, in order per pair and direction

  struct Transfer {
    int peer;
    bool sends;
    char* at;
    size_t left;
  };
  bool exchange() {
    std::vector<Transfer> transfers;
    std::vector<const Operation*> sent, received;  // to and from itself
    for (auto& o : operations_) {
      if (o.lane() != PAIR) continue;
      bool sends = o.kind == Kind::SEND;
      if (o.peer == comm_->rank) (sends ? sent : received).push_back(&o);
      else transfers.push_back({o.peer, sends, sends ? const_cast<char*>(o.from) : o.to, o.bytes()});
    }
    for (size_t i = 0; i < std::min(sent.size(), received.size()); i++)
      memmove(received[i]->to, sent[i]->from, std::min(sent[i]->bytes(), received[i]->bytes()));
    for (;;) {
      if (!hold(silent, comm_->interrupt)) return false;
      std::vector<pollfd> descriptors;
      std::vector<Transfer*> first;
      std::set<std::pair<int, bool>> seen;
      for (auto& t : transfers) {
        if (!t.left || !seen.insert({t.peer, t.sends}).second) continue;
        auto& links = t.sends ? comm_->out : comm_->in;
        descriptors.push_back({links[{t.peer, PAIR}], (short)(t.sends ? POLLOUT : POLLIN), 0});
        first.push_back(&t);
      }
      if (first.empty()) return true;
      if (!await(descriptors, comm_->interrupt)) return false;
      for (size_t i = 0; i < first.size(); i++)
        if (descriptors[i].revents && !progress(*first[i], descriptors[i].fd)) return false;
    }
  }
  bool progress(Transfer& t, int descriptor) {
    ssize_t moved = t.sends ? send(descriptor, t.at, t.left, MSG_NOSIGNAL | MSG_DONTWAIT)
                            : recv(descriptor, t.at, t.left, MSG_DONTWAIT);
    if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (moved < 0 || (moved == 0 && !t.sends)) return lost("rank " + std::to_string(t.peer) + " is gone");
    t.at += moved, t.left -= (size_t)moved;
    return true;
  }

  ncclComm* comm_;
  std::vector<Operation> operations_;
};

// ---- launches: kernels of a communicator run in the order of their launches, whatever their streams

struct Launch {
  ncclComm* comm;
  Kernel kernel;
  long turn;
  size_t streams;                             // further ones: what is before it there comes first, what is after waits
  std::mutex lock;
  std::condition_variable moved;
  size_t arrived = 0;
  bool done = false;

  Launch(ncclComm* comm, Kernel kernel, size_t streams)
      : comm(comm), kernel(std::move(kernel)), turn(comm->launched++), streams(streams) {}
};
using Held = std::shared_ptr<Launch>;

inline void run_launch(void* argument) {
  std::unique_ptr<Held> held((Held*)argument);
  Launch& launch = **held;
  {
    std::unique_lock<std::mutex> one(launch.lock);
    launch.moved.wait(one, [&] { return launch.arrived == launch.streams; });
  }
  {
    std::unique_lock<std::mutex> one(launch.comm->lock);
    launch.comm->moved.wait(one, [&] { return launch.comm->finished == launch.turn; });
  }
  launch.kernel.run();
  {
    std::lock_guard<std::mutex> one(launch.comm->lock);
    launch.comm->finished++;
    launch.comm->moved.notify_all();          // from here on an abort may free the communicator
  }
  std::lock_guard<std::mutex> one(launch.lock);
  launch.done = true;
  launch.moved.notify_all();
}
inline void join_launch(void* argument) {
  std::unique_ptr<Held> held((Held*)argument);
  std::unique_lock<std::mutex> one((*held)->lock);
  (*held)->arrived++;
  (*held)->moved.notify_all();
  (*held)->moved.wait(one, [&] { return (*held)->done; });
}
inline void launch(ncclComm* comm, std::vector<Operation> operations) {
  std::vector<cudaStream_t> streams;
  for (auto& o : operations)
    if (std::find(streams.begin(), streams.end(), o.stream) == streams.end()) streams.push_back(o.stream);
  counts.launches++;
  counts.operations += (long)operations.size();
  std::lock_guard<std::mutex> in_turn(comm->launching);  // turns are enqueued in their order
  Held held;
  {
    std::lock_guard<std::mutex> one(comm->lock);
    held = std::make_shared<Launch>(comm, Kernel(comm, std::move(operations)), streams.size() - 1);
  }
  fakecuda_enqueue(streams[0], run_launch, new Held(held));
  for (size_t i = 1; i < streams.size(); i++) fakecuda_enqueue(streams[i], join_launch, new Held(held));
}

}  // namespace fakenccl
