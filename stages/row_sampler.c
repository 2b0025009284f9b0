/* Draws of `stages.sampling.sampler` in compiled code: the same ids as the arrays of numpy there and in
 * `stages.sampling.gumbel` give, which are the definition. A vocabulary of 150,000 ids takes arrays a
 * millisecond a row, in which the tail computes nothing.
 *
 * Where a result hangs on the rounding of a sum or a logarithm, nothing is drawn, and the caller takes the
 * arrays. */

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define BLOCK_BITS 8
#define BLOCK_SIZE (1 << BLOCK_BITS)
#define STRIP_SIZE 32 /* the largest logits of strips bound a ranking; divides BLOCK_SIZE */
#define STRIPS_OF_BLOCK (BLOCK_SIZE / STRIP_SIZE)
#define MOST_BLOCKS 2048 /* a vocabulary of half a million ids */
#define MOST_STRIPS (MOST_BLOCKS * STRIPS_OF_BLOCK)
#define LANES 4
#define SMALL_VOCABULARY 4096 /* ranked whole where strips are too few */
#define MOST_RACES 64
#define UNDECIDED (-1)

/* Scores that can win lie within some hundred of zero; as in gumbel.py, far more than all rounding there. */
static const double ROUNDING_SLACK = 1e-9;
/* Two scores as close as this may be in another order with another library's logarithm. */
static const double TIE = 1e-12;
/* Relative. Sums of float32 exponentials, and sums of float64 in another order than numpy's. */
static const double ROUGH_SUM_ERROR = 2e-5;
static const double SUM_ERROR = 1e-9;
/* Beyond these temperatures float32 is not enough for a rough sum, or for anything. */
static const double LEAST_TEMPERATURE = 1e-4, MOST_TEMPERATURE = 1e4;

/* Vectors as GCC and Clang define them, for all processors. A comparison gives -1 where it holds. */
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline floats all_of(float value) { return (floats){value, value, value, value}; }

static inline ints ints_of(int32_t value) { return (ints){value, value, value, value}; }

static inline floats pick(ints mask, floats yes, floats no) {
    return (floats)((mask & (ints)yes) | (~mask & (ints)no));
}

/* Logits from `start` on, minus infinity behind the last. */
static inline floats load(const float *logits, size_t start, size_t n_vocab) {
    floats found = all_of(-INFINITY);
    if (start + LANES <= n_vocab) {
        memcpy(&found, logits + start, sizeof found);
    } else {
        memcpy(&found, logits + start, (n_vocab - start) * sizeof *logits);
    }
    return found;
}

struct row {
    const float *logits;
    size_t n_vocab, n_strips, n_blocks;
    double peak, temperature;
    uint64_t key;
    float largest[MOST_STRIPS];     /* logit of each strip */
    double ring_times[MOST_BLOCKS]; /* of each block; negative: not known yet */
    int64_t first[MOST_BLOCKS];
};

/* SplitMix64 and the clocks of gumbel.py. */

static uint64_t word(uint64_t key, uint64_t counter) {
    uint64_t bits = key + (counter + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
}

static double exponential(uint64_t bits) { return -log(((double)(bits >> 12) + 0.5) * 0x1p-52); }

static double ring_time_of_block(struct row *row, size_t block) {
    if (row->ring_times[block] < 0.0) {
        const uint64_t bits = word(row->key, ((uint64_t)1 << 32) + block);
        row->first[block] = ((int64_t)block << BLOCK_BITS) + (int64_t)(bits & (BLOCK_SIZE - 1));
        row->ring_times[block] = exponential(bits) / BLOCK_SIZE;
    }
    return row->ring_times[block];
}

static double ring_time(struct row *row, size_t id) {
    const size_t block = id >> BLOCK_BITS;
    const double time = ring_time_of_block(row, block);
    return row->first[block] == (int64_t)id ? time : time + exponential(word(row->key, id));
}

static double scaled(const struct row *row, float logit) {
    return ((double)logit - row->peak) / row->temperature;
}

/* Largest logit of each strip and of all; false if one is not a number or infinite. */
static bool find_largest(struct row *row) {
    float peak = -INFINITY;
    for (size_t strip = 0; strip < row->n_strips; strip++) {
        const size_t start = strip * STRIP_SIZE;
        const size_t stop = start + STRIP_SIZE < row->n_vocab ? start + STRIP_SIZE : row->n_vocab;
        floats largest = all_of(-INFINITY);
        ints are_usual = ints_of(-1);
        for (size_t place = start; place < stop; place += LANES) {
            const floats logits = load(row->logits, place, row->n_vocab);
            largest = pick(logits > largest, logits, largest);
            are_usual &= logits <= all_of(FLT_MAX);
        }
        float found = -INFINITY;
        for (size_t lane = 0; lane < LANES; lane++) {
            found = largest[lane] > found ? largest[lane] : found;
            if (!are_usual[lane]) {
                return false;
            }
        }
        row->largest[strip] = found;
        peak = found > peak ? found : peak;
    }
    row->peak = peak;
    return peak > -INFINITY;
}

static float largest_of_block(const struct row *row, size_t block) {
    const size_t start = block * STRIPS_OF_BLOCK;
    float largest = -INFINITY;
    for (size_t strip = start; strip < start + STRIPS_OF_BLOCK && strip < row->n_strips; strip++) {
        largest = row->largest[strip] > largest ? row->largest[strip] : largest;
    }
    return largest;
}

/* An id and its logit. */
struct candidate {
    float logit;
    int32_t id;
};

/* Whether an id ranks above another: by logit, then by lowest id. */
static bool is_above(float logit, size_t id, struct candidate other) {
    return logit > other.logit || (logit == other.logit && (int32_t)id < other.id);
}

/* The race: a block's first ring bounds the scores of its ids from above. */

struct winner {
    double score;
    struct candidate candidate;
    bool is_tied;
};

static const struct winner NONE = {-INFINITY, {-INFINITY, INT32_MAX}, false};

static bool is_decided(struct winner best) { return best.score > -INFINITY && !best.is_tied; }

static void race(struct row *row, float logit, size_t id, struct winner *best) {
    const double score = scaled(row, logit) - log(ring_time(row, id));
    if (fabs(score - best->score) <= TIE) {
        best->is_tied = true;
    } else if (score > best->score) {
        *best = (struct winner){score, {logit, (int32_t)id}, false};
    }
}

static void race_block(
    struct row *row, size_t block, double log_min_p, struct candidate limit, struct winner *best
) {
    const size_t start = block * BLOCK_SIZE;
    const size_t stop = start + BLOCK_SIZE < row->n_vocab ? start + BLOCK_SIZE : row->n_vocab;
    const double bonus = -log(ring_time_of_block(row, block));
    for (size_t id = start; id < stop; id++) {
        const float logit = row->logits[id];
        const double own = scaled(row, logit);
        if (own + bonus >= best->score - ROUNDING_SLACK && own >= log_min_p && is_above(logit, id, limit)) {
            race(row, logit, id, best);
        }
    }
}

/* The winner of all ids that min-p leaves and that rank above the limit; NONE without any. */
static struct winner race_all(struct row *row, double log_min_p, struct candidate limit) {
    double bounds[MOST_BLOCKS];
    size_t favourite = 0;
    for (size_t block = 0; block < row->n_blocks; block++) {
        bounds[block] = scaled(row, largest_of_block(row, block)) - log(ring_time_of_block(row, block));
        favourite = bounds[block] > bounds[favourite] ? block : favourite;
    }
    struct winner best = NONE;
    /* The block that may score most leaves few others to look into. */
    race_block(row, favourite, log_min_p, limit, &best);
    for (size_t block = 0; block < row->n_blocks; block++) {
        if (block != favourite && bounds[block] >= best.score - ROUNDING_SLACK) {
            race_block(row, block, log_min_p, limit, &best);
        }
    }
    return best;
}

static struct winner race_among(
    struct row *row, const struct candidate *candidates, size_t count, double log_min_p
) {
    struct winner best = NONE;
    for (size_t place = 0; place < count; place++) {
        const struct candidate each = candidates[place];
        if (scaled(row, each.logit) >= log_min_p) {
            race(row, each.logit, (size_t)each.id, &best);
        }
    }
    return best;
}

static int by_rank(const void *left, const void *right) {
    const struct candidate *a = left, *b = right;
    return is_above(a->logit, (size_t)a->id, *b) ? -1 : 1;
}

/* The value that would be at `place` if the values were in descending order (Hoare's quickselect, 1961). */
static float value_at(float *values, size_t count, size_t place) {
    size_t first = 0, last = count - 1;
    while (first < last) {
        const float pivot = values[(first + last) / 2];
        size_t left = first, right = last;
        for (;;) {
            while (values[left] > pivot) {
                left++;
            }
            while (values[right] < pivot) {
                right--;
            }
            if (left >= right) {
                break;
            }
            const float value = values[left];
            values[left++] = values[right];
            values[right--] = value;
        }
        if (place <= right) {
            last = right;
        } else {
            first = right + 1;
        }
    }
    return values[place];
}

/* All ids whose logit is at least `least`; the number of them. */
static size_t gather(const struct row *row, float least, struct candidate *found) {
    size_t count = 0;
    for (size_t strip = 0; strip < row->n_strips; strip++) {
        if (row->largest[strip] < least) {
            continue;
        }
        const size_t start = strip * STRIP_SIZE;
        const size_t stop = start + STRIP_SIZE < row->n_vocab ? start + STRIP_SIZE : row->n_vocab;
        for (size_t id = start; id < stop; id++) {
            found[count] = (struct candidate){row->logits[id], (int32_t)id};
            count += row->logits[id] >= least;
        }
    }
    return count;
}

/* The `count` highest-ranked ids, in order, at the head of `found`; false where strips are too few to bound
 * them. */
static bool rank(const struct row *row, size_t count, struct candidate *found) {
    float least = -INFINITY;
    if (count <= row->n_strips) {
        /* As many strips as `count` hold a logit of this size. */
        float largest[MOST_STRIPS];
        memcpy(largest, row->largest, row->n_strips * sizeof *largest);
        least = value_at(largest, row->n_strips, count - 1);
    } else if (row->n_vocab > SMALL_VOCABULARY) {
        return false;
    }
    qsort(found, gather(row, least, found), sizeof *found, by_rank);
    return true;
}

/* Sums of the exponentials of scaled logits. */
struct mass {
    double all;
    double above; /* of those that rank above some id */
    double level; /* of those with the same logit, if they are told apart from `above`; that id among them */
};

/* 2 to the power of values that are at most 0, to within 2e-7; below 2^-125 it stays. */
static inline floats exp2_of(floats log2) {
    const floats least = all_of(-125.0f), half = all_of(0.5f), one = all_of(1.0f);
    log2 = pick(log2 > least, log2, least);
    const ints whole = __builtin_convertvector(log2 - half, ints);
    const floats power = (floats)((whole + ints_of(127)) * ints_of(1 << 23));
    /* Taylor's series of a fraction, -0.5 to 0.5. */
    const floats part = (log2 - __builtin_convertvector(whole, floats)) * all_of(0.69314718f);
    floats series = part * all_of(1.0f / 720.0f) + all_of(1.0f / 120.0f);
    series = series * part + all_of(1.0f / 24.0f);
    series = series * part + all_of(1.0f / 6.0f);
    series = series * part + half;
    series = series * part + one;
    return (series * part + one) * power;
}

/* In float32: to within ROUGH_SUM_ERROR of all. */
static struct mass rough_mass(const struct row *row, float given) {
    const floats factor = all_of((float)(1.4426950408889634 / row->temperature));
    const floats peak = all_of((float)row->peak), level_of_given = all_of(given), zero = all_of(0.0f);
    struct mass mass = {0.0, 0.0, 0.0};
    for (size_t start = 0; start < row->n_vocab; start += BLOCK_SIZE) {
        const size_t stop = start + BLOCK_SIZE < row->n_vocab ? start + BLOCK_SIZE : row->n_vocab;
        floats all = zero, above = zero, level = zero;
        for (size_t place = start; place < stop; place += LANES) {
            const floats logits = load(row->logits, place, row->n_vocab);
            const floats powers = exp2_of((logits - peak) * factor);
            all += powers;
            above += pick(logits > level_of_given, powers, zero);
            level += pick(logits == level_of_given, powers, zero);
        }
        for (size_t lane = 0; lane < LANES; lane++) {
            mass.all += all[lane];
            mass.above += above[lane];
            mass.level += level[lane];
        }
    }
    return mass;
}

static struct mass exact_mass(const struct row *row, struct candidate given) {
    struct mass mass = {0.0, 0.0, 0.0};
    for (size_t id = 0; id < row->n_vocab; id++) {
        const double power = exp(scaled(row, row->logits[id]));
        mass.all += power;
        mass.above += is_above(row->logits[id], id, given) ? power : 0.0;
    }
    return mass;
}

enum membership { IN, OUT, UNSURE };

/* Whether an id is in the nucleus: those that rank above it do not reach the goal. */
static enum membership in_nucleus(const struct row *row, struct candidate given, double top_p) {
    struct mass mass = rough_mass(row, given.logit);
    if (mass.above > mass.all * (top_p + ROUGH_SUM_ERROR)) {
        return OUT;
    }
    const double own = exp(scaled(row, given.logit));
    if (mass.above + mass.level - own < mass.all * (top_p - ROUGH_SUM_ERROR)) {
        return IN;
    }
    mass = exact_mass(row, given);
    if (mass.above > mass.all * top_p * (1.0 + SUM_ERROR)) {
        return OUT;
    }
    return mass.above < mass.all * top_p * (1.0 - SUM_ERROR) ? IN : UNSURE;
}

/* The winner in the nucleus, without ranking anything: an id that wins the race of all and is not in the
 * nucleus takes all that rank below it out of the race. */
static int64_t choose_in_nucleus(struct row *row, double top_p, double log_min_p) {
    struct candidate limit = NONE.candidate;
    for (int races = 0; races < MOST_RACES; races++) {
        const struct winner best = race_all(row, log_min_p, limit);
        switch (is_decided(best) ? in_nucleus(row, best.candidate, top_p) : UNSURE) {
        case IN:
            return best.candidate.id;
        case OUT:
            limit = best.candidate;
            break;
        default:
            return UNDECIDED;
        }
    }
    return UNDECIDED;
}

/* How many of the highest-ranked ids have `top_p` of the mass; UNDECIDED where it hangs on rounding. */
static int64_t nucleus_size(
    const struct row *row, const struct candidate *ranked, size_t count, double top_p
) {
    double all = 0.0, mass = 0.0;
    for (size_t place = 0; place < count; place++) {
        all += exp(scaled(row, ranked[place].logit));
    }
    for (size_t place = 0; place < count; place++) {
        mass += exp(scaled(row, ranked[place].logit));
        if (mass >= top_p * all * (1.0 - SUM_ERROR)) {
            return mass > top_p * all * (1.0 + SUM_ERROR) ? (int64_t)place + 1 : UNDECIDED;
        }
    }
    return UNDECIDED;
}

static int64_t choose_in_top(struct row *row, size_t top_k, double top_p, double log_min_p) {
    struct candidate *found = malloc((row->n_vocab + 1) * sizeof *found);
    int64_t count = UNDECIDED;
    if (found != NULL && rank(row, top_k, found)) {
        count = top_p < 1.0 ? nucleus_size(row, found, top_k, top_p) : (int64_t)top_k;
    }
    struct winner best = NONE;
    if (count > 0) {
        best = race_among(row, found, (size_t)count, log_min_p);
    }
    free(found);
    return is_decided(best) ? best.candidate.id : UNDECIDED;
}

/* The id that is drawn, or UNDECIDED.
 *
 * logits: float32, n_vocab of them; minus infinity excludes an id.
 * key: of the position. temperature: above 0. top_k: 0 for no limit. top_p: 1 for no limit.
 * log_min_p: minus infinity for no limit. */
EXPORT int64_t row_sampler_choose(
    const float *logits,
    size_t n_vocab,
    uint64_t key,
    double temperature,
    size_t top_k,
    double top_p,
    double log_min_p
) {
    static _Thread_local struct row row;
    row.logits = logits;
    row.n_vocab = n_vocab;
    row.n_strips = (n_vocab + STRIP_SIZE - 1) / STRIP_SIZE;
    row.n_blocks = (n_vocab + BLOCK_SIZE - 1) / BLOCK_SIZE;
    row.temperature = temperature;
    row.key = key;
    const bool is_usual = temperature >= LEAST_TEMPERATURE && temperature <= MOST_TEMPERATURE;
    if (n_vocab == 0 || row.n_blocks > MOST_BLOCKS || !is_usual || !find_largest(&row)) {
        return UNDECIDED;
    }
    for (size_t block = 0; block < row.n_blocks; block++) {
        row.ring_times[block] = -1.0;
    }
    if (top_k > 0 && top_k < n_vocab) {
        return choose_in_top(&row, top_k, top_p, log_min_p);
    }
    if (top_p < 1.0) {
        return choose_in_nucleus(&row, top_p, log_min_p);
    }
    const struct winner best = race_all(&row, log_min_p, NONE.candidate);
    return is_decided(best) ? best.candidate.id : UNDECIDED;
}
