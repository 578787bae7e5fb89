// What the kernels share: 16-bit numbers, and the memory of a tensor.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef uint16_t bf16;

static inline float wide(float x) { return x; }
static inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
static inline void narrow(float x, float* to) { *to = x; }
static inline void narrow(float x, bf16* to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *to = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // nan stays nan
}
constexpr long AHEAD = 4096;  // bytes between what is read and what is asked for, so that it is there in time

// `size` bytes that lie AHEAD of those from x on will be needed.
static inline void ask_for(const void* x, long size) {
    for (long byte = 0; byte < size; byte += 64) __builtin_prefetch((const char*)x + AHEAD + byte);
}

template <typename T>
static const T* data(const at::Tensor& x) { return (const T*)x.const_data_ptr(); }
