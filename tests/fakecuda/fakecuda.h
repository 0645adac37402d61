// What the stand-in for CUDA offers beside CUDA's own calls: to the stand-in for NCCL, to kernels.cpp and, by ctypes,
// to tests (control.py). Faults to order and what is counted are listed here, and only here.
#pragma once
#include <cuda_runtime_api.h>

// Counted in each process since its start, and per stream where that says yes. A "wait" is the host's.
//  name                       per stream, what
#define FAKECUDA_COUNTS(X) \
  X(launches)               /* yes  kernels, among them torch's operations and NCCL's                              */ \
  X(copies)                 /* yes  cudaMemcpy*, asynchronous or not                                               */ \
  X(sets)                   /* yes  cudaMemset*                                                                    */ \
  X(events_recorded)        /* yes                                                                                 */ \
  X(events_awaited)         /* yes  cudaStreamWaitEvent: the stream waits, not the host                            */ \
  X(host_functions)         /* yes  cudaLaunchHostFunc                                                             */ \
  X(stream_waits)           /* yes  cudaStreamSynchronize                                                          */ \
  X(copy_waits)             /* yes  copies that return only when they are done, or have staged pageable memory     */ \
  X(form_waits)             /* yes  operations whose result's form depends on data (nonzero, masked_select)        */ \
  X(event_waits)            /* no   cudaEventSynchronize                                                           */ \
  X(device_waits)           /* no   cudaDeviceSynchronize, and that implied by cudaFree, cudaFreeHost, unregister  */ \
  X(stream_queries)         /* yes  cudaStreamQuery                                                                */ \
  X(event_queries)          /* no   cudaEventQuery                                                                 */ \
  X(allocations)            /* no   cudaMalloc                                                                     */ \
  X(host_allocations)       /* no   cudaHostAlloc                                                                  */ \
  X(registrations)          /* no   cudaHostRegister, those that succeeded                                         */ \
  X(refused_registrations)  /* no   a fault fired: refuse_register                                                 */ \
  X(refused_allocations)    /* no   a fault fired: refuse_malloc, or `mib` are in use                              */ \
  X(slow_copies)            /* no   a fault fired: slow_bus                                                        */ \
  X(spins)                  /* no   a fault fired: spin                                                            */ \
  X(breaks)                 /* no   a fault fired: the context has died                                            */

// Faults and settings, each an environment variable FAKECUDA_<NAME> read at the first call of CUDA, and the first
// argument of fakecuda_order later.
//      name                default   what
#define FAKECUDA_ORDERS(X)                                                                                            \
  X(refuse_register, 0)  /* 1: cudaHostRegister gives cudaErrorNotSupported                                        */ \
  X(refuse_malloc, 0)    /* the next N calls of cudaMalloc give cudaErrorMemoryAllocation                          */ \
  X(break_after, 0)      /* the Nth launch from now on kills the context: cudaErrorIllegalAddress, for ever        */ \
  X(slow_bus, 0)         /* nanoseconds that a MiB takes between host and device                                   */ \
  X(spin, 0)             /* 1: the next kernel spins, until this is 0, the context dies or the process ends        */ \
  X(kernel_us, 0)        /* microseconds that every kernel takes longer                                            */ \
  X(devices, 1)          /* number of devices; CUDA_VISIBLE_DEVICES selects among them                             */ \
  X(mib, 8192)           /* memory of a device                                                                     */

#ifdef __cplusplus
extern "C" {
#endif
// Enqueues a kernel: `f` is called in the stream's order, on the stream's thread. It is called in any case, for it
// owns `argument`; if fakecuda_broken() says so by then, it must do nothing else than release it. It must not wait for
// ever: a loop ends when fakecuda_broken() is not 0.
void fakecuda_enqueue(cudaStream_t stream, void (*f)(void*), void* argument);
// Waits for what is on the stream; counted as form_waits. Returns the sticky error, or 0.
int fakecuda_wait(cudaStream_t stream);
// Kills the context: every later call gives `error`, kernels that wait in streams do nothing.
void fakecuda_break(int error);
// That error, cudaErrorCudartUnloading while the process ends, else 0.
int fakecuda_broken(void);
// Returns 0, or -1 if there is no such fault or setting.
int fakecuda_order(const char* name, long value);
// Writes one JSON object: the counts, "bytes" and "host_bytes" in use, "threads", and "streams": a list of such
// objects. Returns the length that it has, as snprintf does.
int fakecuda_report(char* text, unsigned long size);
#ifdef __cplusplus
}
#endif
