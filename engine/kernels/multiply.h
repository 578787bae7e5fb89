// `Multiply`: the loop in which linear layers, and attention of many tokens, spend their time. Each kind of processor has
// its own (multiply.cpp), and choose.cpp chooses one when the library is loaded. No header of torch is included here.
#pragma once
#include <cstdint>

typedef uint16_t bf16;

constexpr long SIDE = 32;                             // Outputs of a block.
template <typename T> constexpr long PAIR = 4 / sizeof(T);  // Numbers in 4 bytes: 16-bit numbers are multiplied in pairs.

// sums[tokens][SIDE] = x[tokens][in] times one block [in / PAIR][SIDE][PAIR] of a packed matrix. `in` is a multiple of
// PAIR. Rows of x and of sums lie `stride` and `apart` numbers apart.
template <typename T>
struct Job {
    long tokens;
    const T* x;
    long stride;
    const T* block;
    long in;
    float* sums;
    long apart = SIDE;
    bool add = false;   // Adds to what `sums` holds.
    // If several jobs go through the block (tiles read their next step instead):
    long ahead = 0;  // bytes from the block's begin to what is prefetched first,
    long pace = 0;   // and bytes to go on by for each SIDE * 4 bytes that are read.
};

constexpr long GROUP = 32;  // Inputs that share a scale, of x and of a weight in few bits.
template <int BITS> constexpr long GROUP_BYTES = SIDE * 2 + GROUP * SIDE * BITS / 8;  // of a block

// sums[tokens][SIDE] = x times one block of a weight in few bits (linear.h). x is rounded by groups of inputs.
struct CodesJob {
    struct Group {
        float scale;    // x is int8 times this
        int32_t start;  // what its sums begin with: codes are weights plus half their range
    };
    long tokens;
    const int8_t* x;      // [count][tokens][GROUP]
    const Group* groups;  // [count][tokens]
    const char* block;
    long count, bits;
    float* sums;
};

struct Multiply {
    const char* name;
    long most_floats, most_bf16, most_codes;  // Tokens of one job.
    long part_floats, part_bf16;  // Bytes of a block that several jobs go through before the next bytes are read.
    void (*floats)(const Job<float>&);
    void (*bf16s)(const Job<bf16>&);
    void (*codes)(const CodesJob&);
    void (*done)();  // Called by each thread after its last job.

    void run(const Job<float>& job) const { floats(job); }
    void run(const Job<bf16>& job) const { bf16s(job); }
    template <typename T> long most() const { return sizeof(T) == 2 ? most_bf16 : most_floats; }
    template <typename T> long part() const { return sizeof(T) == 2 ? part_bf16 : part_floats; }
};

const Multiply& multiply_in_use();
