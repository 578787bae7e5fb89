// Chooses the `Multiply` of the processor at hand. KINDS(kind) lists those that the compiler could build, best first:
// loader.py defines it.
#include "multiply.h"

#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define DECLARE(kind) extern const Multiply kind;
KINDS(DECLARE)
#undef DECLARE

// Whether the processor has what a kind needs.
extern "C" bool processor_has(const char* name) {
    auto is = [&](const char* other) { return !std::strcmp(name, other); };
    if (is("plain")) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    unsigned a = 0, b = 0, c = 0, d = 0;
    bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    bool dots = vnni && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
    if (is("avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (is("avx512")) return avx512;
    if (is("avx512vnni")) return vnni;
    if (is("avx512bf16")) return dots;
    if (is("amx")) return dots && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1;
#endif
    return false;
}

// Whether the operating system lets this process use a kind. It must be asked for AMX: the tiles of a thread are 8 KB
// that it keeps when it switches to another.
static bool allowed(const char* name) {
    if (std::strcmp(name, "amx")) return true;
#if defined(__linux__) && defined(__x86_64__)
    const long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA);
#endif
    return false;
}

static const Multiply* in_use = nullptr;

// Uses the best kind there is, or the one of that name. Returns the name of the kind in use.
extern "C" const char* use_kernel(const char* name) {
#define USE(kind) \
    if ((!name || !std::strcmp(name, kind.name)) && processor_has(kind.name) && allowed(kind.name)) \
        return (in_use = &kind)->name;
    KINDS(USE)
#undef USE
    return multiply_in_use().name;
}

// Whether the compiler could build a kind.
extern "C" bool is_built(const char* name) {
#define IS(kind) \
    if (!std::strcmp(name, kind.name)) return true;
    KINDS(IS)
#undef IS
    return false;
}

const Multiply& multiply_in_use() {
    if (!in_use) use_kernel(nullptr);
    return *in_use;
}
