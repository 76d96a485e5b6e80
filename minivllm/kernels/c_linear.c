/* Chapter 8: rows times a weight, out = x W^T, in C.

The weight [out_features, in_features] is kept in panels of PANEL of its rows: 16 here, 32 where vectors have
512 bits. Within a panel lies word 0 of these rows, then word 1, and so on. A word is 32 bits: one number in
float32, two neighbours in bfloat16.

    panel 0:   w[0][0] w[1][0] .. w[15][0]   w[0][1] w[1][1] .. w[15][1]   w[0][2] ..
    panel 1:   w[16][0] ..

So a panel is one stream, read front to back. A tile of up to TILE rows of x meets it with TILE x 2 vectors
of sums, that stay in registers: each word of the weight that is read serves all rows of the tile, each word of
x serves PANEL columns of the result. DEPTH words at a time: so much of a panel stays in a core's cache while
one tile after another meets it. The first tile waits for weights from memory, so it asks for those that lie
AHEAD bytes on; the tiles after it ask for the panel's next DEPTH words.

Each number of the result is summed in the same order whatever rows stand beside it. */

#include "c_numbers.h"

enum { VECS = 2, PANEL = VECS * LANES, MOST = 12, TILE = LANES == 16 ? MOST : 6 }; // for 32 or 16 registers
enum { DEPTH = 128, MAX_ROWS = 120 }; // rows whose sums stay near, while a panel is read
enum { AHEAD = 2048 }; // bytes
enum { NOTHING, SWISH, ADD, MUL }; // swish is oneDNN's name of silu

typedef struct { // c_linear.py has the same fields in the same order
    const uint32_t *x; // words [num_rows, words]; rows are x_row words apart
    const float *panels; // words [num_panels, words, PANEL]
    char *out; // [num_rows, out_features], in dtype, contiguous
    const char *bias, *other; // bias [out_features] or NULL; other as out, rows other_row numbers apart
    int64_t num_rows, words, out_features, x_row, other_row, then, dtype, num_threads;
} Product;

INLINE void add_tile(const int dtype, const int rows, int64_t steps, const uint32_t *x, int64_t x_row,
                     const float *weights, const char *ahead, float *sums) {
    vec sum[MOST][VECS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < VECS; c++) sum[r][c] = load(sums + r * PANEL + c * LANES);
    for (int64_t k = 0; k < steps; k++) {
        vec w[VECS];
        for (int c = 0; c < VECS; c++) w[c] = load(weights + k * PANEL + c * LANES);
        for (int c = 0; c < PANEL; c += 16) __builtin_prefetch(ahead + (k * PANEL + c) * sizeof(float));
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < VECS; c++)
                sum[r][c] = add_word(dtype, sum[r][c], all(x + r * x_row + k), w[c]);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < VECS; c++) store(sums + r * PANEL + c * LANES, sum[r][c]);
}

// What comes after the product, of `n` columns of one row: a bias, silu, or a sum or product with `other`.
INLINE void finish(const Product *p, const int dtype, int64_t row, int64_t column, int64_t n, float *sums) {
    float room[PANEL], numbers[PANEL] = {0};
    if (p->bias) {
        const float *bias = read_row(p->bias + column * SIZE(dtype), dtype, n, n, room);
        for (int64_t c = 0; c < n; c++) sums[c] += bias[c];
    }
    if (p->then == SWISH) // x / (1 + e^-x), by e^-|x|, which is never too large
        for (int c = 0; c < PANEL; c++) {
            const float size = sums[c] < 0 ? sums[c] : -sums[c], e = power_of_two(size * 1.44269504f);
            sums[c] *= (sums[c] < 0 ? e : 1) / (1 + e);
        }
    if (p->then == ADD || p->then == MUL) {
        const char *from = p->other + (row * p->other_row + column) * SIZE(dtype);
        memcpy(numbers, read_row(from, dtype, n, n, room), n * sizeof(float));
        for (int c = 0; c < PANEL; c++)
            sums[c] = p->then == ADD ? sums[c] + numbers[c] : sums[c] * numbers[c];
    }
    write_row(p->out + (row * p->out_features + column) * SIZE(dtype), dtype, n, sums);
}

#define CASE(n) case n: add_tile(dtype, n, steps, x, p->x_row, weights, ahead, sums + r * PANEL); break
INLINE void panel_product(const Product *p, const int dtype, int64_t panel, int64_t first, int64_t rows) {
    float sums[MAX_ROWS * PANEL];
    memset(sums, 0, rows * PANEL * sizeof(float));
    const int64_t tile = ceil_div(rows, ceil_div(rows, TILE)); // all of about the same size
    for (int64_t k = 0; k < p->words; k += DEPTH) {
        const int64_t steps = min(DEPTH, p->words - k);
        const float *weights = p->panels + (panel * p->words + k) * PANEL;
        for (int64_t r = 0; r < rows; r += tile) {
            const uint32_t *x = p->x + (first + r) * p->x_row + k;
            const char *ahead = (const char *)weights + (r == 0 ? AHEAD : steps * PANEL * sizeof(float));
            switch (min(tile, rows - r)) {
                CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6);
                CASE(7); CASE(8); CASE(9); CASE(10); CASE(11); CASE(12);
            }
        }
    }
    const int64_t column = panel * PANEL, n = min(PANEL, p->out_features - column);
    for (int64_t r = 0; r < rows; r++) finish(p, dtype, first + r, column, n, sums + r * PANEL);
}

INLINE void all_panels(const Product *p, const int dtype) {
    const int64_t panels = ceil_div(p->out_features, PANEL), parts = ceil_div(p->num_rows, MAX_ROWS);
    const int64_t each = parts ? ceil_div(p->num_rows, parts) : 0; // rows of a part, all of about the same size
    const int64_t work = p->num_rows * p->words * p->out_features;
    #pragma omp parallel for schedule(guided, 2) num_threads(p->num_threads) if (work >= 8 * WORTH_THREADS)
    for (int64_t i = 0; i < panels * parts; i++) {
        const int64_t first = i / panels * each;
        panel_product(p, dtype, i % panels, first, min(each, p->num_rows - first));
    }
}

void linear(const Product *p) {
    if (p->dtype == FLOAT32) all_panels(p, FLOAT32);
    else all_panels(p, BFLOAT16);
}

int64_t panel_size(void) { return PANEL; }
int64_t multiplies_bfloat16(void) { return HAS_DPBF16; }
