// Reductions of the stand-in for NCCL (nccl.cpp has the head): element by element, rounded to the type at each step.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <nccl.h>

#include <cstdint>
#include <cstring>

namespace fakenccl {

inline size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 0;
  }
}
inline bool can_reduce(ncclDataType_t type) { return type != ncclFloat8e4m3 && type != ncclFloat8e5m2; }
inline bool is_float(ncclDataType_t type) { return type >= ncclFloat16 && type <= ncclBfloat16; }

// What a type is computed in: sums of two 16-bit floats round the same by way of float.
template <class T> struct Wide { using type = T; };
template <> struct Wide<__half> { using type = float; };
template <> struct Wide<__nv_bfloat16> { using type = float; };
template <class T> typename Wide<T>::type widen(T x) { return x; }
inline float widen(__half x) { return __half2float(x); }
inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T, class W> T narrow(W x) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else return (T)x;
}

// A reduction as it was when the operation was issued: an operator made by PreMulSum may be destroyed after that.
struct Reduction {
  ncclRedOp_t op = ncclSum;           // Sum, Prod, Max or Min
  bool scaled = false;                // each rank's input is multiplied by a factor first
  double factor = 1;                  // the factor, unless it lies in device memory
  const void* factor_at = nullptr;
  int divisor = 1;                    // the result is divided by this: the mean of integers
};

template <class T> void accumulate(T* total, const T* more, size_t n, ncclRedOp_t op) {
  for (size_t i = 0; i < n; i++) {
    auto a = widen(total[i]), b = widen(more[i]);
    switch (op) {
      case ncclProd: total[i] = narrow<T>(a * b); break;
      case ncclMax: total[i] = narrow<T>(a < b ? b : a); break;
      case ncclMin: total[i] = narrow<T>(b < a ? b : a); break;
      default: total[i] = narrow<T>(a + b);
    }
  }
}
template <class T> void scale(T* values, size_t n, const Reduction& reduction) {
  using W = typename Wide<T>::type;
  W factor = widen(reduction.factor_at ? *(const T*)reduction.factor_at : narrow<T>((W)reduction.factor));
  for (size_t i = 0; i < n; i++) values[i] = narrow<T>(widen(values[i]) * factor);
}
template <class T> void divide(T* values, size_t n, int divisor) {
  for (size_t i = 0; i < n; i++) values[i] = narrow<T>(widen(values[i]) / (typename Wide<T>::type)divisor);
}

// Calls f with a pointer to the type: f((float*)nullptr).
template <class F> void of_type(ncclDataType_t type, F f) {
  switch (type) {
    case ncclInt8: return f((int8_t*)nullptr);
    case ncclUint8: return f((uint8_t*)nullptr);
    case ncclInt32: return f((int32_t*)nullptr);
    case ncclUint32: return f((uint32_t*)nullptr);
    case ncclInt64: return f((int64_t*)nullptr);
    case ncclUint64: return f((uint64_t*)nullptr);
    case ncclFloat16: return f((__half*)nullptr);
    case ncclBfloat16: return f((__nv_bfloat16*)nullptr);
    case ncclFloat32: return f((float*)nullptr);
    case ncclFloat64: return f((double*)nullptr);
    default: return;
  }
}
inline void accumulate(ncclDataType_t type, void* total, const void* more, size_t n, const Reduction& reduction) {
  of_type(type, [&](auto* t) { accumulate((decltype(t))total, (decltype(t))more, n, reduction.op); });
}
inline void scale(ncclDataType_t type, void* values, size_t n, const Reduction& reduction) {
  of_type(type, [&](auto* t) { scale((decltype(t))values, n, reduction); });
}
inline void divide(ncclDataType_t type, void* values, size_t n, int divisor) {
  of_type(type, [&](auto* t) { divide((decltype(t))values, n, divisor); });
}

}  // namespace fakenccl
