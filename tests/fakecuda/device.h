// What the files of the stand-in for CUDA share. Everything is in one library, and nothing here is exported.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "fakecuda.h"

namespace fakecuda {

#define FIELD(name) std::atomic<long> name{0};
struct Counts {
  FAKECUDA_COUNTS(FIELD)
};
#undef FIELD
#define FIELD(name, value) std::atomic<long> name{value};
struct Orders {
  FAKECUDA_ORDERS(FIELD)
};
#undef FIELD

Counts& counts();
Orders& orders();

// Both are leaked on purpose: threads use them until the process is gone.
struct Stream;

// A place in a stream: reached once everything before it is done. All fields are guarded by `lock()`.
struct Mark {
  bool done = false;
  std::chrono::steady_clock::time_point at;
  std::condition_variable reached;
  std::vector<Stream*> parked;  // streams whose next item waits for this
};

struct Stream {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  bool is_default = false;
  unsigned long id = 0;
  Counts counts;
  struct Item {
    std::function<void()> run;  // or one of the following
    std::shared_ptr<Mark> await, reach;
  };
  std::deque<Item> queue;
  bool scheduled = false;  // a thread has it, or it is parked
  bool dying = false;
};

std::mutex& lock();
Stream* stream_of(cudaStream_t);
std::vector<Stream*> streams_of(int device);
void put(Stream*, std::function<void()>);
void put_kernel(Stream*, std::function<void()>);  // with the faults that are ordered for kernels
void wait(Stream*);
void wait_for_device(int device);
int threads();

// The calling thread's device, and its last error as cudaGetLastError gives it.
int& current_device();
cudaError_t fail(cudaError_t);
// The error that any call gives now: after a fork, at the process's end, or in a dead context.
cudaError_t refused(bool even_if_broken = false);
bool is_initialised();
int device_count();

// Memory
struct Block {
  uintptr_t from = 0;
  size_t size = 0;
  enum Kind { pageable, device_memory, pinned, registered } kind = pageable;
  int device = 0;
};
Block block_of(const void*);  // pageable if it is not one of CUDA's
size_t bytes_in_use(int device);
size_t host_bytes_in_use();
size_t device_bytes();

}  // namespace fakecuda

// First line of an entry point that a dead context answers with its error.
#define ALIVE                                                                        \
  do {                                                                               \
    if (cudaError_t error_ = fakecuda::refused()) return fakecuda::fail(error_);     \
  } while (0)
// First line of one that answers all the same.
#define ENTER                                                                        \
  do {                                                                               \
    if (cudaError_t error_ = fakecuda::refused(true)) return fakecuda::fail(error_); \
  } while (0)
#define COUNT(stream, name) (fakecuda::counts().name++, (stream)->counts.name++)
