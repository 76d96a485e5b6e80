/* Chapter 8: paged attention on a CPU, in one function for every step.

Decode, prefill and a chunk with history differ only in how many queries a sequence has. An item of work is a
tile of queries of one sequence, for some key/value heads, and a range of its keys. A key/value head's rows are
the tile's queries, each with the heads of the group beside each other, so that each key and value is read from
memory once for the whole group. With 3 heads:   q0h0 q0h1 q0h2 q1h0 q1h1 q1h2 ...

    for 32 keys at a time, and for each key/value head of the item
        scores = rows x keys        in strips of up to 3 rows and 4 keys: 12 sums, that stay in registers
        weights = 2^(score - most)  the softmax so far, in float32: when a larger score comes, what was summed
                                    is scaled down
        summed += weights x values  in strips of up to 3 rows and 4 vectors

Few queries have little to compute, so all depends on how memory is read. A block's keys and values, of all
heads, lie in one piece; so few queries take all heads in one item. A processor that reads ahead by itself
stops where the piece ends; so memory is asked for the keys and values of the next 32 tokens, a row at a
time, between the products of those in hand. A tile of many queries takes one head at a time.

In bfloat16 keys are multiplied as they lie, in words of two numbers, and values become float32 in a register.
The scale is applied to the sums, which must be float32 numbers without it.

Threads take the next item when they are done with one. Where a few long contexts would keep only a few threads
busy, their keys are cut into parts: each part leaves its sum, its largest score and its total, and these are
put together at the end. Slots that hold no token of the sequence are never read. Strides are int64 and count
numbers, not bytes: a pool may have more than 2^31 of them. */

#include <math.h>
#include <stdlib.h>

#include "c_numbers.h"

enum { MAX_ROWS = 64, MAX_DIM = 256 }; // at least MAX_GROUP and MAX_HEAD_DIM of limits.py
enum { STRIP = 3 }; // rows at once: 12 vectors of sums
enum { KEYS = 32, MIN_PART = 128, PARTS_EACH = 4 }; // keys at once, in a part at least; parts a thread

typedef struct { // keys or values of a layer: [num_blocks, num_kv_heads, block_size, head_dim]
    char *data;
    int64_t block, head, slot; // strides
} Cache;

typedef struct { // one call; c_paged.py has the same fields in the same order
    Cache k_cache, v_cache;
    int64_t block_size, num_kv_heads, head_dim, dtype, num_threads;
    const char *q; // as out [num_tokens, num_heads, head_dim], in row_dtype: the caches', for float16 float32
    char *out;
    int64_t row_dtype;
    int64_t q_token, q_head, out_token, out_head, group;
    const int32_t *block_tables, *seq_lens, *query_start;
    int64_t table_row, num_seqs;
    double scale;
} Step;

typedef struct {
    int64_t seq, first_query, num_queries, first_head, num_heads; // the tile; its key/value heads
    int64_t first_key, last_key, part, num_parts; // which of how many ranges its keys are cut into
    float *left; // what each part leaves, [num_parts, all heads, rows, MAX_DIM + 2], from part 0 on; or NULL
} Item;

typedef struct { // a place in the keys of a sequence
    const int32_t *block;
    int64_t slot;
} Place;

// Where the next n keys and values of the first head stand.
INLINE Place find_rows(const Step *s, Place at, int64_t n, const char **k, const char **v) {
    const Cache *keys = &s->k_cache, *values = &s->v_cache;
    const int64_t size = SIZE(s->dtype);
    for (int64_t j = 0; j < n; j++, at.slot++) {
        if (at.slot == s->block_size) { // counted, not divided: a division takes as long as ten products
            at.slot = 0;
            at.block++;
        }
        k[j] = keys->data + (*at.block * keys->block + at.slot * keys->slot) * size;
        v[j] = values->data + (*at.block * values->block + at.slot * values->slot) * size;
    }
    return at;
}

typedef struct { // rows of a head that come after those in hand
    const char **rows;
    int64_t head, num_rows, bytes; // bytes from the first head's row to this one's; how many; bytes of a row
} Next;

// Asks memory for row j, so that it is there when its turn comes. Between products, a row at a time: to ask
// for many at once is to wait.
INLINE void ask_for(const Next *next, int64_t j) {
    if (j < next->num_rows)
        for (int64_t byte = 0; byte < next->bytes; byte += 64)
            __builtin_prefetch(next->rows[j] + next->head + byte);
}

// Scores of `rows` rows and KEYS keys, all as long as `dim` numbers, which is whole vectors.
INLINE void score_strip(const int dtype, const int rows, int64_t dim, const char *q, const char **k,
                        Next next, float *scores) {
    const int64_t bytes = dim * SIZE(dtype);
    for (int64_t j = 0; j < KEYS; j += 4) {
        vec sum[STRIP][4] = {0};
        for (int c = 0; c < 4; c++) ask_for(&next, j + c);
        for (int64_t at = 0; at < bytes; at += sizeof(vec))
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < 4; c++)
                    sum[r][c] = add_word(dtype, sum[r][c], load(q + r * bytes + at), load(k[j + c] + at));
        for (int r = 0; r < rows; r++) add_lanes(sum[r], scores + r * KEYS + j);
    }
}

// n values, of each `vecs` vectors from number d on, weighted and added to what is summed.
INLINE void add_columns(const int dtype, const int rows, const int vecs, int64_t n, int64_t dim,
                        const float *weights, const char **v, Next next, int64_t d, float *summed) {
    vec sum[STRIP][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) sum[r][c] = load(summed + r * dim + d + c * LANES);
    for (int64_t j = 0; j < n; j++) {
        ask_for(&next, j);
        vec value[4];
        for (int c = 0; c < vecs; c++) value[c] = widen(dtype, v[j], d + c * LANES);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < vecs; c++) sum[r][c] += weights[r * KEYS + j] * value[c];
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) store(summed + r * dim + d + c * LANES, sum[r][c]);
}

// The same for all columns.
INLINE void value_strip(const int dtype, const int rows, int64_t n, int64_t dim, const float *weights,
                        const char **v, Next next, float *summed) {
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES, next.num_rows = 0)
        add_columns(dtype, rows, 4, n, dim, weights, v, next, d, summed);
    for (; d < dim; d += LANES, next.num_rows = 0)
        add_columns(dtype, rows, 1, n, dim, weights, v, next, d, summed);
}

// The softmax so far, with KEYS more scores in `row`, of which `seen` count. Returns what the sum shrinks by.
INLINE float weigh(float *row, int seen, float scale, float *largest, float *total) {
    float most = *largest, sum = 0;
    for (int j = 0; j < KEYS; j++) row[j] *= scale;
    for (int j = max(seen, 0); j < KEYS; j++) row[j] = -INFINITY;
    #pragma omp simd reduction(max : most)
    for (int j = 0; j < KEYS; j++) most = row[j] > most ? row[j] : most;
    const float base = most == -INFINITY ? 0 : most; // no key seen yet: no -inf - -inf, which is NaN
    #pragma omp simd reduction(+ : sum)
    for (int j = 0; j < KEYS; j++) {
        row[j] = power_of_two(row[j] - base);
        sum += row[j];
    }
    const float shrink = power_of_two(*largest - base);
    *total = *total * shrink + sum;
    *largest = most;
    return shrink;
}

#define CASE(strip, rows, ...) case rows: strip(dtype, rows, __VA_ARGS__); break
#define ROWS(strip, ...) switch (min(STRIP, rows - r)) { \
    CASE(strip, 1, __VA_ARGS__); CASE(strip, 2, __VA_ARGS__); CASE(strip, 3, __VA_ARGS__); }
// n keys, the first at position `start`, for all rows of one key/value head; largest and total: of each row.
INLINE void add_keys(const Step *s, const Item *item, const int dtype, int64_t dim, int64_t start, int64_t n,
                     int64_t position, const char **k, const char **v, Next k_next, Next v_next,
                     const char *q, float *summed, float *largest, float *total) {
    const int64_t rows = item->num_queries * s->group;
    const float scale = s->scale * 1.4426950408889634; // log2(e): e^x = 2^(x * log2(e))
    float scores[MAX_ROWS * KEYS];
    for (int64_t r = 0; r < rows; r += STRIP, k_next.num_rows = 0)
        ROWS(score_strip, dim, q + r * dim * SIZE(dtype), k, k_next, scores + r * KEYS)
    for (int64_t r = 0; r < rows; r++) { // the query of row r sees the keys up to its own position
        const int seen = min(n, position + r / s->group + 1 - start);
        const float shrink = weigh(scores + r * KEYS, seen, scale, &largest[r], &total[r]);
        for (int64_t d = 0; d < dim; d++) summed[r * dim + d] *= shrink;
    }
    for (int64_t r = 0; r < rows; r += STRIP, v_next.num_rows = 0)
        ROWS(value_strip, n, dim, scores + r * KEYS, v, v_next, summed + r * dim)
}

// A row of keys or values in whole vectors: where it lies, or else in `room`, whose end stays as it was.
INLINE const char *whole_row(const char *row, int64_t dtype, int64_t head_dim, int64_t dim, float *room) {
    if (dtype == FLOAT16) return (const char *)read_row(row, dtype, head_dim, dim, room);
    return dim == head_dim ? row : memcpy(room, row, head_dim * SIZE(dtype));
}

INLINE void attend(const Step *s, const Item *item, const int dtype) { // dtype: in which numbers are multiplied
    const int64_t head_dim = s->head_dim, group = s->group;
    const int64_t lanes = sizeof(vec) / SIZE(dtype), dim = ceil_div(head_dim, lanes) * lanes;
    const int64_t rows = item->num_queries * group, all_rows = item->num_heads * rows; // of a head, of all
    const int64_t token = s->query_start[item->seq] + item->first_query; // the first of the tile
    const int64_t position = s->seq_lens[item->seq] - (s->query_start[item->seq + 1] - token); // its own
    const int64_t row_size = SIZE(dtype), size = SIZE(s->dtype);
    char q[MAX_ROWS * MAX_DIM * sizeof(float)];
    float summed[MAX_ROWS * MAX_DIM], largest[MAX_ROWS], total[MAX_ROWS];
    float k_room[KEYS * MAX_DIM], v_room[KEYS * MAX_DIM];
    const char *k_at[KEYS], *v_at[KEYS], *k[KEYS], *v[KEYS];

    memset(q, 0, all_rows * dim * row_size); // from head_dim to dim zeros stay
    memset(summed, 0, all_rows * dim * sizeof(float));
    if (dim > head_dim) {
        memset(k_room, 0, KEYS * dim * sizeof(float));
        memset(v_room, 0, KEYS * dim * sizeof(float));
    }
    for (int64_t r = 0; r < all_rows; r++) {
        const int64_t query = token + r % rows / group;
        const int64_t head = (item->first_head + r / rows) * group + r % group;
        memcpy(q + r * dim * row_size, s->q + (query * s->q_token + head * s->q_head) * row_size,
               head_dim * row_size);
        largest[r] = -INFINITY;
        total[r] = 0;
    }

    Place at = {s->block_tables + item->seq * s->table_row + item->first_key / s->block_size,
                item->first_key % s->block_size};
    at = find_rows(s, at, min(KEYS, item->last_key - item->first_key), k_at, v_at);
    for (int64_t start = item->first_key; start < item->last_key; start += KEYS) {
        const int64_t n = min(KEYS, item->last_key - start), more = min(KEYS, item->last_key - start - n);
        const char *k_next[KEYS], *v_next[KEYS];
        at = find_rows(s, at, more, k_next, v_next);
        for (int64_t h = 0; h < item->num_heads; h++) {
            const int64_t k_head = (item->first_head + h) * s->k_cache.head * size;
            const int64_t v_head = (item->first_head + h) * s->v_cache.head * size;
            const Next k_more = {k_next, k_head, more, head_dim * size};
            const Next v_more = {v_next, v_head, more, head_dim * size};
            for (int64_t j = 0; j < n; j++) {
                k[j] = whole_row(k_at[j] + k_head, s->dtype, head_dim, dim, k_room + j * dim);
                v[j] = whole_row(v_at[j] + v_head, s->dtype, head_dim, dim, v_room + j * dim);
            }
            for (int64_t j = n; j < KEYS; j++) k[j] = k[0]; // scores that nobody sees
            const int64_t row = h * rows;
            add_keys(s, item, dtype, dim, start, n, position, k, v, k_more, v_more, q + row * dim * row_size,
                     summed + row * dim, largest + row, total + row);
        }
        memcpy(k_at, k_next, sizeof k_at);
        memcpy(v_at, v_next, sizeof v_at);
    }

    for (int64_t r = 0; r < all_rows; r++) {
        const int64_t query = token + r % rows / group;
        const int64_t head = (item->first_head + r / rows) * group + r % group;
        if (item->left) {
            float *part = item->left + (item->first_head * rows + r) * (MAX_DIM + 2);
            memcpy(part, summed + r * dim, head_dim * sizeof(float));
            part[MAX_DIM] = largest[r];
            part[MAX_DIM + 1] = total[r];
        } else { // no key at all: zeros, not 0 / 0
            char *to = s->out + (query * s->out_token + head * s->out_head) * row_size;
            const float sum = item->last_key ? total[r] : 1;
            for (int64_t d = 0; d < head_dim; d++) summed[r * dim + d] /= sum;
            write_row(to, s->row_dtype, head_dim, summed + r * dim);
        }
    }
}

// Put the parts of a tile together: each weighs as much as its largest score says.
static void combine(const Step *s, const Item *item) {
    const int64_t rows = item->num_queries * s->group, row_size = MAX_DIM + 2;
    const int64_t token = s->query_start[item->seq] + item->first_query;
    for (int64_t r = item->first_head * rows; r < (item->first_head + item->num_heads) * rows; r++) {
        const int64_t query = token + r % rows / s->group, head = r / rows * s->group + r % s->group;
        const float *first = item->left + r * row_size;
        float most = -INFINITY, total = 0, summed[MAX_DIM] = {0};
        for (int64_t i = 0; i < item->num_parts; i++) {
            const float largest = first[i * s->num_kv_heads * rows * row_size + MAX_DIM];
            most = largest > most ? largest : most;
        }
        for (int64_t i = 0; i < item->num_parts; i++) {
            const float *part = first + i * s->num_kv_heads * rows * row_size;
            const float weight = power_of_two(part[MAX_DIM] - most);
            total += weight * part[MAX_DIM + 1];
            for (int64_t d = 0; d < s->head_dim; d++) summed[d] += weight * part[d];
        }
        for (int64_t d = 0; d < s->head_dim; d++) summed[d] /= total;
        const int64_t to = query * s->out_token + head * s->out_head;
        write_row(s->out + to * SIZE(s->row_dtype), s->row_dtype, s->head_dim, summed);
    }
}

// The items of a step; written unless `items` is NULL. Returns their number.
static int64_t plan(const Step *s, int64_t part, Item *items, float *left, int64_t *num_keys,
                    int64_t *num_left) {
    const int64_t tile = MAX_ROWS / s->group;
    int64_t n = 0;
    *num_keys = *num_left = 0;
    for (int64_t seq = 0; seq < s->num_seqs; seq++) {
        const int64_t query_len = s->query_start[seq + 1] - s->query_start[seq], seq_len = s->seq_lens[seq];
        for (int64_t first = (ceil_div(query_len, tile) - 1) * tile; first >= 0; first -= tile) { // longest first
            const int64_t queries = min(tile, query_len - first), rows = queries * s->group;
            const int64_t end = seq_len ? seq_len - query_len + first + queries : 0;
            const int64_t parts = max(1, ceil_div(end, part)), heads = min(MAX_ROWS / rows, s->num_kv_heads);
            for (int64_t i = 0; i < parts; i++) {
                for (int64_t head = 0; head < s->num_kv_heads; head += heads, n++)
                    if (items)
                        items[n] = (Item){seq, first, queries, head, min(heads, s->num_kv_heads - head),
                                          i * part, min(end, (i + 1) * part), i, parts,
                                          parts > 1 ? left + *num_left : NULL};
                if (parts > 1) *num_left += s->num_kv_heads * rows * (MAX_DIM + 2);
            }
            *num_keys += end;
        }
    }
    return n;
}

// Returns 0, or 1 without the memory for it.
int paged_attention(const Step *s) {
    int64_t num_keys, num_left;
    plan(s, INT64_MAX / 2, NULL, NULL, &num_keys, &num_left);
    int64_t part = max(MIN_PART, ceil_div(num_keys, PARTS_EACH * s->num_threads));
    part = s->num_threads > 1 ? ceil_div(part, KEYS) * KEYS : INT64_MAX / 2;
    const int64_t n = plan(s, part, NULL, NULL, &num_keys, &num_left);
    Item *items = malloc((n + 1) * sizeof(Item));
    float *left = malloc((num_left + 1) * sizeof(float));
    const int failed = !items || !left;
    if (!failed) {
        plan(s, part, items, left, &num_keys, &num_left);
        #pragma omp parallel for schedule(dynamic) num_threads(s->num_threads)
        for (int64_t i = 0; i < n; i++)
            if (s->dtype == BFLOAT16) attend(s, &items[i], BFLOAT16);
            else attend(s, &items[i], FLOAT32);
        if (num_left) {
            #pragma omp parallel for schedule(dynamic) num_threads(s->num_threads)
            for (int64_t i = 0; i < n; i++)
                if (items[i].left && items[i].part == 0) combine(s, &items[i]);
        }
    }
    free(items);
    free(left);
    return failed;
}

typedef struct { // one call of store_kv; strides in numbers
    Cache k_cache, v_cache;
    const char *k, *v; // [num_tokens, num_kv_heads, head_dim]
    int64_t k_token, k_head, v_token, v_head;
    const int64_t *slot_mapping;
    int64_t num_tokens, num_kv_heads, head_dim, block_size, itemsize, num_threads;
} Tokens;

void store_kv(const Tokens *t) {
    const int64_t size = t->itemsize;
    #pragma omp parallel for num_threads(t->num_threads) if (t->num_tokens * t->num_kv_heads * t->head_dim >= WORTH_THREADS)
    for (int64_t token = 0; token < t->num_tokens; token++) {
        const int64_t slot = t->slot_mapping[token];
        const int64_t block = slot / t->block_size, offset = slot % t->block_size;
        for (int64_t head = 0; slot >= 0 && head < t->num_kv_heads; head++) {
            const int64_t k_to = block * t->k_cache.block + head * t->k_cache.head + offset * t->k_cache.slot;
            const int64_t v_to = block * t->v_cache.block + head * t->v_cache.head + offset * t->v_cache.slot;
            const char *k = t->k + (token * t->k_token + head * t->k_head) * size;
            const char *v = t->v + (token * t->v_token + head * t->v_head) * size;
            memcpy(t->k_cache.data + k_to * size, k, t->head_dim * size);
            memcpy(t->v_cache.data + v_to * size, v, t->head_dim * size);
        }
    }
}
