// Shared by all kernels: conversion of bfloat16, vector helpers, prefetch, and access to a tensor's memory.
#pragma once
#include "multiply.h"
#include "team.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

static inline float wide(float x) { return x; }
static inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
static inline void narrow(float x, float* to) { *to = x; }
static inline void narrow(float x, bf16* to) {  // Rounds to nearest, ties to even.
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *to = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // nan stays nan.
}
static inline int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// Tests the bits: with -ffast-math, the compiler assumes that every float is finite. The first number of a distribution
// is enough, because a distribution is nan everywhere or nowhere.
static inline bool is_nan(const float* x) { return (bits_of(*x) & 0x7fffffff) > 0x7f800000; }
static inline bool all_finite(const float* x, long count) {
    int wrong = 0;
    for (long i = 0; i < count; i++) wrong |= int((bits_of(x[i]) & 0x7f800000) == 0x7f800000);
    return !wrong;
}
static inline void set_nan(float* x) {
    volatile uint32_t hidden = 0x7fc00000;  // From the compiler, which may leave out what makes a nan.
    const uint32_t bits = hidden;
    std::memcpy(x, &bits, 4);
}

#ifdef __AVX512F__
// The mask of the first n of 16 lanes.
static inline __mmask16 first(long n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1; }

// e^x for x <= 0, with an error of 2e-7. Below 2^-126 it is 0, because some processors take a hundred cycles for a
// denormal number.
static inline __m512 exponential(__m512 x) {
    auto power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    auto normal = _mm512_cmp_ps_mask(power, _mm512_set1_ps(-126), _CMP_NLT_UQ);  // nan stays nan.
    auto whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    auto rest = _mm512_sub_ps(power, whole), y = _mm512_set1_ps(1.5403530e-4f);  // 2^rest: ln(2)^k / k!
    for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 0.24022651f, 0.69314718f, 1.f})
        y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(c));
    return _mm512_maskz_scalef_ps(normal, y, whole);
}
#endif

constexpr long AHEAD = 4096;  // Bytes from the address that is read to the one prefetched, which must arrive in time.

// Prefetches `size` bytes that start AHEAD bytes after x, which is read up to `end` and then from `next` on.
static inline void ask_for(const void* x, long size, const void* end, const void* next) {
    for (long byte = 0; byte < size; byte += 64) {
        const char* line = (const char*)x + AHEAD + byte;
        __builtin_prefetch(line < end ? line : (const char*)next + (line - (const char*)end));
    }
}

template <typename T>
static const T* data(const at::Tensor& x) { return (const T*)x.const_data_ptr(); }

// Zeros, float32, of which few will be written: the operating system gives large memory as pages of zeros, and a page
// that nobody writes costs nothing.
static inline at::Tensor untouched_zeros(at::IntArrayRef sizes) {
    long count = 1;
    for (long size : sizes) count *= size;
    void* memory = std::calloc(std::max(count, 1l), sizeof(float));
    TORCH_CHECK(memory, "out of memory: ", count * 4, " bytes");
    return at::from_blob(memory, sizes, [](void* memory) { std::free(memory); }, at::kFloat);
}
