// With GNU_OPENMP, torch's parallel loops call the threads of GNU's OpenMP library by name. Torch's headers use a pragma
// instead, which clang turns into calls of LLVM's library: torch's wheels for Linux do not bring that one.
#pragma once

#ifdef GNU_OPENMP
#define INTRA_OP_PARALLEL

#include <algorithm>
#include <cstdint>

extern "C" {
void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads();
int omp_get_thread_num();
}

namespace at::internal {

// Calls f(from, to) on each thread, for its part of begin ... end: of at least `grain` numbers if there are so many.
template <typename F>
void invoke_parallel(int64_t begin, int64_t end, int64_t grain, const F& f) {
    auto part = [&] {
        const int64_t most = grain > 0 ? (end - begin + grain - 1) / grain : end - begin;
        const int64_t threads = std::min<int64_t>(omp_get_num_threads(), most);
        const int64_t length = (end - begin + threads - 1) / threads, from = begin + omp_get_thread_num() * length;
        if (from < end) f(from, std::min(end, from + length));
    };
    GOMP_parallel([](void* data) { (*static_cast<decltype(part)*>(data))(); }, &part, 0, 0);
}

}  // namespace at::internal
#endif
