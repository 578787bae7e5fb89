// AMX tiles made of software, so that the code for them is tested on every x86 processor. Included before multiply.cpp.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps

struct SoftwareTiles {
    uint8_t rows[8], numbers[8][16][64];
    uint16_t bytes[8];
    bool configured = false;

    void check(bool right, const char* what) {
        if (!right) std::fprintf(stderr, "%s\n", what), std::abort();
    }
    void configure(const void* shape) {  // Intel's manual, LDTILECFG: 64 bytes.
        auto at = (const uint8_t*)shape;
        check(at[0] == 1, "palette");
        for (int tile = 0; tile < 8; tile++) {
            std::memcpy(bytes + tile, at + 16 + 2 * tile, 2), rows[tile] = at[48 + tile];
            check(1 <= rows[tile] && rows[tile] <= 16 && bytes[tile] <= 64, "size of a tile");
        }
        std::memset(numbers, 0xff, sizeof numbers);  // nan, until it is written
        configured = true;
    }
    void zero(int tile) {
        check(configured, "no configuration");
        std::memset(numbers[tile], 0, sizeof numbers[tile]);
    }
    void load(int tile, const void* from, long stride) {
        zero(tile);
        for (int row = 0; row < rows[tile]; row++)
            std::memcpy(numbers[tile][row], (const char*)from + row * stride, bytes[tile]);
    }
    void store(int tile, void* to, long stride) {
        check(configured, "no configuration");
        for (int row = 0; row < rows[tile]; row++) std::memcpy((char*)to + row * stride, numbers[tile][row], bytes[tile]);
    }
    float number(int tile, int row, int at) {  // a bfloat16 number
        uint32_t bits = 0;
        std::memcpy((char*)&bits + 2, numbers[tile][row] + 2 * at, 2);
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    void multiply(int c, int a, int b) {
        check(configured && rows[c] == rows[a] && bytes[c] == bytes[b] && bytes[a] == 4 * rows[b], "shapes of tiles");
        for (int m = 0; m < rows[c]; m++)
            for (int n = 0; n < bytes[c] / 4; n++) {
                float sum;
                std::memcpy(&sum, numbers[c][m] + 4 * n, 4);
                for (int k = 0; k < bytes[a] / 4; k++)
                    sum += number(a, m, 2 * k) * number(b, k, 2 * n) + number(a, m, 2 * k + 1) * number(b, k, 2 * n + 1);
                std::memcpy(numbers[c][m] + 4 * n, &sum, 4);
            }
    }
};
static thread_local SoftwareTiles tiles_of_thread;

#define _tile_loadconfig(shape) tiles_of_thread.configure(shape)
#define _tile_release() (tiles_of_thread.configured = false)
#define _tile_zero(tile) tiles_of_thread.zero(tile)
#define _tile_loadd(tile, from, stride) tiles_of_thread.load(tile, from, stride)
#define _tile_stored(tile, to, stride) tiles_of_thread.store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) tiles_of_thread.multiply(c, a, b)
