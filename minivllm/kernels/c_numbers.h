/* Chapter 8: numbers for the kernels in C: many at once, powers of two, and those of 16 bits in and out.

Tests set LANES, and WITHOUT_DPBF16, to try what this machine does not do. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#ifndef LANES // float32 numbers in a vector: 512 bits where registers have them, else 256
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif
enum { FLOAT32, FLOAT16, BFLOAT16 };
enum { WORTH_THREADS = 8192 }; // fewer numbers are done by one thread: to wake another takes longer
#define SIZE(dtype) ((dtype) == FLOAT32 ? 4 : 2) // bytes

#define INLINE static inline __attribute__((always_inline)) // loops over constant arguments are unrolled

// Numbers that are added and multiplied at once. GCC and Clang know such types on every CPU.
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t narrow __attribute__((vector_size(2 * LANES)));
typedef float eight __attribute__((vector_size(32)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t lanes __attribute__((vector_size(32)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif

INLINE vec load(const void *from) { return *(const unaligned *)from; }
INLINE void store(float *to, vec x) { *(unaligned *)to = x; }
INLINE vec all(const uint32_t *x) { return (vec)(*x | (words){0}); } // the same bits in every lane
INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

INLINE float from_bits(uint32_t bits) {
    union { uint32_t bits; float number; } same = {bits};
    return same.number;
}

INLINE uint32_t bits_of(float number) {
    union { float number; uint32_t bits; } same = {number};
    return same.bits;
}

// 2^x for x <= 0, without a call, so that the compiler makes vectors of it. NaN stays NaN, -inf gives 0.
INLINE float power_of_two(float x) {
    const float shift = 12582912.0f; // 1.5 * 2^23: floats of this size are whole; their low bits count
    const float rounded = x + shift, rest = x - (rounded - shift); // rest: -0.5 .. 0.5
    float p = 1.5345812e-4f; // minimax polynomial: with these coefficients off by 2e-8 of 2^rest
    p = p * rest + 1.3399931e-3f;
    p = p * rest + 9.6184890e-3f;
    p = p * rest + 5.5503288e-2f;
    p = p * rest + 2.4022647e-1f;
    p = p * rest + 6.9314721e-1f;
    p = p * rest + 1.0f;
    return x < -126.0f ? 0.0f : p * from_bits((bits_of(rounded) + 127) << 23); // the exponent's bits
}

// sum + x0 w0 + x1 w1 in each lane, of pairs of bfloat16, number 0 in the lower half. The instruction takes
// what is smaller than 2^-126 for zero.
#if defined __AVX512BF16__ && LANES == 16 && !defined WITHOUT_DPBF16
#define HAS_DPBF16 1
INLINE vec add_pairs(vec sum, vec x, vec w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
#else
#define HAS_DPBF16 0
INLINE vec lower(vec x) { return (vec)((words)x << 16); }
INLINE vec upper(vec x) { return (vec)((words)x & 0xffff0000u); }
INLINE vec add_pairs(vec sum, vec x, vec w) { return sum + lower(x) * lower(w) + upper(x) * upper(w); }
#endif

// sum + x w in each lane: of one number in float32, of a pair in bfloat16.
INLINE vec add_word(const int dtype, vec sum, vec x, vec w) {
    return dtype == BFLOAT16 ? add_pairs(sum, x, w) : sum + x * w;
}

// As many numbers as a vector has lanes, from number d of a row on, as float32.
INLINE vec widen(const int dtype, const char *row, int64_t d) {
    if (dtype != BFLOAT16) return load((const float *)row + d);
    narrow numbers;
    memcpy(&numbers, row + d * 2, sizeof numbers);
    return (vec)(__builtin_convertvector(numbers, words) << 16); // the upper half of a float32
}

INLINE eight fold(vec x) { // x as eight numbers: of sixteen, the two halves are added
    eight parts[LANES / 8];
    memcpy(parts, &x, sizeof x);
    return LANES == 8 ? parts[0] : parts[0] + parts[LANES / 8 - 1];
}

// Four vectors: the sum of each one's numbers. Neighbours are added, until there is one number of each.
INLINE void add_lanes(const vec *x, float *to) {
#define PAIRS(a, b) (SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15))
    const eight a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
    const eight ab = PAIRS(a, b), cd = PAIRS(c, d), halves = PAIRS(ab, cd);
    for (int i = 0; i < 4; i++) to[i] = halves[i] + halves[i + 4];
}

// A row of head_dim numbers as float32, in whole vectors, dim numbers: where it lies if it is that already,
// else in `room`.
INLINE const float *read_row(const char *row, int64_t dtype, int64_t head_dim, int64_t dim, float *room) {
    const uint16_t *from = (const uint16_t *)row;
    if (dtype == FLOAT32) {
        if (dim == head_dim) return (const float *)row;
        memcpy(room, row, head_dim * sizeof(float));
    } else if (dtype == BFLOAT16) { // the upper half of a float32
        for (int64_t d = 0; d < head_dim; d++) room[d] = from_bits((uint32_t)from[d] << 16);
    } else { // its exponent counts from -15, a float32's from -127
        for (int64_t d = 0; d < head_dim; d++) {
            const uint32_t sign = (from[d] & 0x8000u) << 16, size = (from[d] & 0x7fffu) << 13;
            const uint32_t special = size >= 0x0f800000 ? 0x7f800000 : 0; // infinity and NaN keep theirs
            room[d] = from_bits(bits_of(from_bits(size) * 0x1p112f) | special | sign);
        }
    }
    return room;
}

// As bfloat16, to the nearest, ties to even: the upper half of the float32, after half a unit was added.
INLINE uint16_t bfloat16(float number) {
    const uint32_t bits = bits_of(number);
    return (number == number ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000) >> 16; // NaN stays NaN
}

// A row of float32 numbers into a tensor in float32 or bfloat16.
INLINE void write_row(char *row, int64_t dtype, int64_t n, const float *from) {
    if (dtype == FLOAT32) {
        memcpy(row, from, n * sizeof(float));
        return;
    }
    for (int64_t d = 0; d < n; d++) ((uint16_t *)row)[d] = bfloat16(from[d]);
}
