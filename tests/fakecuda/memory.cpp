// Memory and copies of the stand-in for CUDA.
//
// Answers: allocations up to a device's size; page-locked, registered and pageable memory, told apart by address;
// registration of memory that is mapped and not registered yet; copies by the programming guide's "API synchronization
// behavior": pinned memory is read and written when the stream comes to it, pageable memory is read at the call, and a
// copy into it is waited for; cudaFree and its like wait for the device; memory in use after cudaFree is a segmentation
// fault; an allocation that gets the addresses of memory which was unmapped while it was registered is refused
// (cudaErrorAlreadyMapped, as on an H100).
// Cannot: a fault at the host's access to device memory (it is ordinary memory), IPC, virtual memory management, pools,
// managed memory, peers.
#include "device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <thread>

namespace fakecuda {
namespace {

constexpr size_t PAGE = 4096, DEVICE_PAGE = 2 << 20;

struct State {
  std::mutex lock;
  std::map<uintptr_t, Block> blocks;
  std::map<int, size_t> used;
  size_t host_used = 0;
};

State& state() {
  static auto* one = new State;  // leaked, as in streams.cpp
  return *one;
}

using Guard = std::lock_guard<std::mutex>;

// Device memory has a name in /proc/PID/maps, by which bin/nvidia-smi adds up what all processes have; and a forked
// child does not inherit it.
void* mapped(size_t size, Block::Kind kind) {
  constexpr int access = PROT_READ | PROT_WRITE;
  if (kind != Block::device_memory)
    return mmap(nullptr, size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  int file = memfd_create("fakecuda-device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, size)) return close(file), MAP_FAILED;
  void* at = mmap(nullptr, size, access, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (at != MAP_FAILED) madvise(at, size, MADV_DONTFORK);
  return at;
}

// Call with the lock held.
bool overlaps(uintptr_t from, uintptr_t to) {
  auto after = state().blocks.lower_bound(to);
  if (after == state().blocks.begin()) return false;
  auto& before = std::prev(after)->second;
  return before.from + before.size > from;
}

cudaError_t take(void** pointer, size_t size, Block::Kind kind) {
  *pointer = nullptr;
  if (!size) return cudaSuccess;
  size_t page = kind == Block::device_memory ? DEVICE_PAGE : PAGE;
  size = (size + page - 1) / page * page;
  int device = current_device();
  Guard guard(state().lock);
  if (kind == Block::device_memory) {
    auto& refusals = orders().refuse_malloc;
    if (refusals > 0 || state().used[device] + size > device_bytes()) {
      if (refusals > 0) refusals--;
      counts().refused_allocations++;
      return fail(cudaErrorMemoryAllocation);
    }
  }
  void* at = mapped(size, kind);
  if (at == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  auto from = reinterpret_cast<uintptr_t>(at);
  if (overlaps(from, from + size)) return munmap(at, size), fail(cudaErrorAlreadyMapped);
  state().blocks[from] = {from, size, kind, device};
  (kind == Block::device_memory ? state().used[device] : state().host_used) += size;
  *pointer = at;
  return cudaSuccess;
}

cudaError_t give_back(void* pointer, Block::Kind kind) {
  if (!pointer) return cudaSuccess;
  counts().device_waits++;
  wait_for_device(current_device());
  Guard guard(state().lock);
  auto found = state().blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == state().blocks.end() || found->second.kind != kind) return fail(cudaErrorInvalidValue);
  auto& block = found->second;
  (kind == Block::device_memory ? state().used[block.device] : state().host_used) -= block.size;
  munmap(pointer, block.size);
  state().blocks.erase(found);
  return cudaSuccess;
}

bool is_mapped(uintptr_t from, uintptr_t to) {
  std::vector<unsigned char> pages((to - from) / PAGE);
  return mincore(reinterpret_cast<void*>(from), to - from, pages.data()) == 0;
}

bool is_pageable(const void* pointer) { return block_of(pointer).kind == Block::pageable; }
bool is_device(const void* pointer) { return block_of(pointer).kind == Block::device_memory; }

// Enqueues `move` of `size` bytes; `host`: it crosses the bus.
void put_copy(Stream* stream, size_t size, bool host, std::function<void()> move) {
  COUNT(stream, copies);
  long per_mib = host ? orders().slow_bus.load() : 0;
  if (per_mib) counts().slow_copies++;
  put(stream, [=] {
    if (per_mib) std::this_thread::sleep_for(std::chrono::nanoseconds(static_cast<long>(per_mib * (size / 1048576.0))));
    if (!fakecuda_broken()) move();
  });
}

cudaError_t copy(void* to, const void* from, size_t size, Stream* stream, bool blocks) {
  if (!size) return cudaSuccess;
  bool from_pageable = is_pageable(from), host = !is_device(to) || !is_device(from);
  blocks = blocks || is_pageable(to);
  if (blocks || from_pageable) COUNT(stream, copy_waits);
  if (from_pageable && !blocks) {
    auto* begin = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(begin, begin + size);
    put_copy(stream, size, host, [=] { memcpy(to, staged->data(), size); });
  } else {
    put_copy(stream, size, host, [=] { memmove(to, from, size); });
  }
  if (blocks) wait(stream);
  return fail(refused());
}

}  // namespace

Block block_of(const void* pointer) {
  auto at = reinterpret_cast<uintptr_t>(pointer);
  Guard guard(state().lock);
  auto after = state().blocks.upper_bound(at);
  if (after == state().blocks.begin()) return {};
  auto& block = std::prev(after)->second;
  return at < block.from + block.size ? block : Block{};
}

size_t device_bytes() { return static_cast<size_t>(orders().mib) << 20; }

size_t bytes_in_use(int device) {
  Guard guard(state().lock);
  return state().used[device];
}

size_t host_bytes_in_use() {
  Guard guard(state().lock);
  return state().host_used;
}

}  // namespace fakecuda

using namespace fakecuda;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t size) {
  ALIVE;
  counts().allocations++;
  return take(pointer, size, Block::device_memory);
}

cudaError_t cudaFree(void* pointer) {
  ALIVE;
  return give_back(pointer, Block::device_memory);
}

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  ALIVE;
  counts().host_allocations++;
  return take(pointer, size, Block::pinned);
}

cudaError_t cudaMallocHost(void** pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }

cudaError_t cudaFreeHost(void* pointer) {
  ALIVE;
  return give_back(pointer, Block::pinned);
}

cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  ALIVE;
  auto at = reinterpret_cast<uintptr_t>(pointer);
  auto from = at / PAGE * PAGE, to = (at + size + PAGE - 1) / PAGE * PAGE;
  if (!pointer || !size || !is_mapped(from, to)) return fail(cudaErrorInvalidValue);
  if (orders().refuse_register) {
    counts().refused_registrations++;
    return fail(cudaErrorNotSupported);
  }
  Guard guard(state().lock);
  if (overlaps(from, to)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  state().blocks[from] = {from, to - from, Block::registered, current_device()};
  counts().registrations++;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  ALIVE;
  counts().device_waits++;
  wait_for_device(current_device());
  Guard guard(state().lock);
  auto found = state().blocks.find(reinterpret_cast<uintptr_t>(pointer) / PAGE * PAGE);
  if (found == state().blocks.end() || found->second.kind != Block::registered)
    return fail(cudaErrorHostMemoryNotRegistered);
  state().blocks.erase(found);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  ALIVE;
  memset(attributes, 0, sizeof *attributes);
  auto block = block_of(pointer);
  bool is_host = block.kind != Block::device_memory;
  attributes->type = block.kind == Block::pageable ? cudaMemoryTypeUnregistered
                     : is_host                     ? cudaMemoryTypeHost
                                                   : cudaMemoryTypeDevice;
  attributes->device = block.kind == Block::pageable ? cudaInvalidDeviceId : block.device;
  if (is_host) attributes->hostPointer = const_cast<void*>(pointer);
  if (block.kind != Block::pageable) attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ALIVE;
  *total = device_bytes();
  *free = *total - bytes_in_use(current_device());
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  ALIVE;
  return copy(to, from, size, stream_of(stream), !is_device(to) && !is_device(from));
}

// Copies within the device are the one kind that the host does not wait for.
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  ALIVE;
  return copy(to, from, size, stream_of(nullptr), !is_device(to) || !is_device(from));
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind,
    cudaStream_t handle) {
  ALIVE;
  auto* stream = stream_of(handle);
  bool blocks = is_pageable(to) || is_pageable(from);
  put_copy(stream, width * height, !is_device(to) || !is_device(from), [=] {
    for (size_t row = 0; row < height; row++)
      memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  });
  if (blocks) {
    COUNT(stream, copy_waits);
    wait(stream);
  }
  return fail(refused());
}

cudaError_t cudaMemsetAsync(void* at, int value, size_t size, cudaStream_t handle) {
  ALIVE;
  auto* stream = stream_of(handle);
  COUNT(stream, sets);
  put(stream, [=] {
    if (!fakecuda_broken()) memset(at, value, size);
  });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* at, int value, size_t size) { return cudaMemsetAsync(at, value, size, nullptr); }

}  // extern "C"
