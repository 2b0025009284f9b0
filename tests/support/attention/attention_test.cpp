// Tests of the attention kernel, through ggml's own operation and dispatcher. The exit status is 0 if all is well.
//
//   attention_test invariance N SEED   bits of a row: alone, and among others, with other cells between its own, by 1
//                                      to 4 threads; N random rows, each in four surroundings
//   attention_test accuracy N SEED     N random problems against float64, and that it is not ggml's kernel that runs
//   attention_test time                nanoseconds a head and position with ggml's kernel and with this one

#include "attention_problem.h"
#include "attention_rows.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <initializer_list>
#include <random>
#include <string>

namespace {

// Largest error, relative to the largest result.
constexpr double ACCURACY_LIMIT = 5e-6;
constexpr int SURROUNDINGS = 4;

std::mt19937 random_bits;

int one_of(std::initializer_list<int> choices) { return choices.begin()[random_bits() % choices.size()]; }

int between(int least, int most) { return least + (int) (random_bits() % (uint32_t) (most - least + 1)); }

bool one_in(int count) { return random_bits() % count == 0; }

// From a random place of a long sequence on: drawing all anew would take longer than attention.
Numbers normal_numbers(size_t count, float deviation = 1.0f) {
    static const Numbers sequence = [] {
        std::normal_distribution<float> distribution;
        Numbers drawn((1 << 20) + 7);
        for (float & number : drawn) {
            number = distribution(random_bits);
        }
        return drawn;
    }();
    Numbers numbers(count);
    size_t place = random_bits() % sequence.size();
    for (float & number : numbers) {
        number = deviation * sequence[place];
        place = place + 1 < sequence.size() ? place + 1 : 0;
    }
    return numbers;
}

ggml_type random_type(int row_size) {
    if (row_size % 32 != 0) {
        return (ggml_type) one_of({GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32});
    }
    return (ggml_type) one_of({GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32,
                               GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q5_1});
}

// Everything but rows, cells, masks and numbers.
Problem random_shape() {
    static const int sizes[][2] = {{32, 32},   {40, 40},   {64, 64},   {64, 64},   {72, 72},   {80, 80},  {96, 96},
                                   {128, 128}, {128, 128}, {192, 128}, {256, 256}, {576, 512}, {52, 52}};
    Problem problem;
    const int * size = sizes[between(0, (int) (sizeof sizes / sizeof *sizes) - 1)];
    problem.key_size = size[0];
    problem.value_size = size[1];
    problem.are_values_in_keys = problem.key_size == 576;
    problem.num_kv_heads = problem.are_values_in_keys ? 1 : one_of({1, 2, 3, 8});
    problem.num_heads = problem.num_kv_heads * one_of({1, 1, 2, 3, 4, 7, 8});
    if (problem.are_values_in_keys && one_in(2)) {
        problem.num_heads = one_of({16, 40});  // more than one unit takes
    }
    problem.key_type = random_type(problem.key_size);
    problem.value_type = problem.are_values_in_keys || !one_in(4) ? problem.key_type : random_type(problem.value_size);
    if (problem.value_size % ggml_blck_size(problem.value_type) != 0) {
        problem.value_type = GGML_TYPE_F16;
    }
    problem.scale = 1.0f / std::sqrt((float) problem.key_size);
    problem.softcap = one_in(4) ? 30.0f : 0.0f;
    problem.max_bias = one_in(4) ? 8.0f : 0.0f;
    if (one_in(4)) {
        problem.sinks = normal_numbers(problem.num_heads, 2.0f);
    }
    return problem;
}

// Fewer cells where there would be too much to compute in float64.
int bounded_cells(const Problem & problem, int num_cells) {
    const double work = (double) problem.num_streams * problem.num_rows * problem.num_heads *
                        (problem.key_size + problem.value_size);
    return std::max(1, (int) std::min((double) num_cells, 1e8 / work));
}

void fill_with_numbers(Problem & problem) {
    problem.queries = normal_numbers(problem.query_at(problem.num_streams, 0, 0), 2.0f);
    problem.keys = normal_numbers(problem.cell_at(problem.num_streams, 0) * problem.key_size);
    if (!problem.are_values_in_keys) {
        problem.values = normal_numbers(problem.cell_at(problem.num_streams, 0) * problem.value_size);
    }
}

std::string description(const Problem & problem) {
    char text[300];
    snprintf(
        text, sizeof text,
        "head %d/%d, heads %d/%d, rows %d, cells %d, streams %d, masks %d, types %s %s, bias %g, softcap %g, sinks %d",
        problem.key_size, problem.value_size, problem.num_heads, problem.num_kv_heads, problem.num_rows,
        problem.num_cells, problem.num_streams, problem.num_mask_heads, ggml_type_name(problem.key_type),
        ggml_type_name(problem.value_type), problem.max_bias, problem.softcap, (int) !problem.sinks.empty());
    return text;
}

// ---- accuracy ----

enum class View { TEXT, WINDOW, RANDOM, NOTHING_AT_TIMES, COUNT };

bool sees(View view, int row, int cell, const Problem & problem) {
    const int last = problem.num_cells - problem.num_rows + row;
    switch (view) {
        case View::TEXT:
            return cell <= last;
        case View::WINDOW:
            return cell <= last && cell > last - 300;
        case View::RANDOM:
            return !one_in(3);
        default:
            return row % 3 != 0;
    }
}

void fill_with_masks(Problem & problem) {
    const View view = (View) between(0, (int) View::COUNT - 1);
    problem.num_mask_heads = one_in(8) ? problem.num_heads : 1;
    if (one_in(5) && problem.max_bias == 0.0f) {
        problem.num_mask_heads = 0;
        return;
    }
    problem.masks.resize(problem.mask_at(problem.num_streams, 0, 0));
    for (size_t place = 0; place < problem.masks.size(); ++place) {
        const int cell = (int) (place % problem.num_cells), row = (int) (place / problem.num_cells) % problem.num_rows;
        const float bias = problem.max_bias > 0.0f ? -(float) std::abs(problem.num_cells - cell) : 0.0f;
        problem.masks[place] = sees(view, row, cell, problem) ? bias : -INFINITY;
    }
}

// Scores of minus infinity for some cells: for a whole segment of them if a row sees all. No row of any view sees one
// of these cells first, where ggml's kernel gives what is no number.
void fill_with_endless_scores(Problem & problem) {
    const int first = 256, end = 560;
    const bool has_infinity = ggml_blck_size(problem.key_type) == 1;
    if (problem.are_values_in_keys || !has_infinity || problem.num_cells < 2 * end) {
        return;
    }
    for (size_t place = 0; place < problem.queries.size(); place += problem.key_size) {
        problem.queries[place] = 1.0f;
    }
    for (int stream = 0; stream < problem.num_streams; ++stream) {
        for (size_t row = problem.cell_at(stream, first); row < problem.cell_at(stream, end); ++row) {
            problem.keys[row * problem.key_size] = -INFINITY;
        }
    }
}

Problem random_problem() {
    Problem problem = random_shape();
    problem.num_rows = one_of({1, 1, 2, 3, 5, 8, 17, 33, 63, 130});
    problem.num_streams = one_of({1, 1, 1, 2});
    problem.num_cells = bounded_cells(problem, between(1, one_in(2) ? 300 : 3000));
    fill_with_numbers(problem);
    if (one_in(2)) {
        fill_with_endless_scores(problem);
    }
    fill_with_masks(problem);
    return problem;
}

double relative_error(const Numbers & result, const std::vector<double> & exact) {
    double largest_error = 0.0, largest = 0.0;
    for (size_t place = 0; place < result.size(); ++place) {
        const double error = std::fabs(result[place] - exact[place]);
        largest_error = std::isnan(error) ? INFINITY : std::max(largest_error, error);
        largest = std::max(largest, std::fabs(exact[place]));
    }
    return largest > 0.0 ? largest_error / largest : largest_error;
}

int test_accuracy(int num_cases) {
    int num_bad = 0, num_different = 0;
    double worst = 0.0, worst_of_ggml = 0.0, logarithms = 0.0, logarithms_of_ggml = 0.0;
    const bool has_kernel = attention_rows_version() != 0;
    for (int number = 0; number < num_cases; ++number) {
        const Problem problem = random_problem();
        const std::vector<double> exact = exact_result(problem);
        const int num_threads = between(1, 3);
        Graph graph(problem);
        attention_rows_enable(0);
        const Numbers of_ggml = graph.result(num_threads);
        attention_rows_enable(1);
        const Numbers result = graph.result(num_threads);
        num_different += memcmp(result.data(), of_ggml.data(), result.size() * sizeof(float)) != 0;
        const double error = relative_error(result, exact), error_of_ggml = relative_error(of_ggml, exact);
        worst = std::max(worst, error);
        worst_of_ggml = std::max(worst_of_ggml, error_of_ggml);
        logarithms += std::log(std::max(error, 1e-12));
        logarithms_of_ggml += std::log(std::max(error_of_ggml, 1e-12));
        if (has_kernel && !(error <= ACCURACY_LIMIT)) {
            ++num_bad;
            printf("case %d: error %.2e: %s\n", number, error, description(problem).c_str());
        }
    }
    printf(
        "accuracy: %d cases, %d above %g; largest error %.2e, of ggml's kernel %.2e; geometric mean %.2e and %.2e; "
        "other bits than ggml's kernel in %d\n",
        num_cases, num_bad, ACCURACY_LIMIT, worst, worst_of_ggml, std::exp(logarithms / num_cases),
        std::exp(logarithms_of_ggml / num_cases), num_different);
    const bool runs_as_it_says = has_kernel == (num_different > num_cases / 2);
    if (!runs_as_it_says) {
        printf("the version is %d, but this is not the kernel that runs\n", attention_rows_version());
    }
    return num_bad + !runs_as_it_says;
}

// ---- invariance ----

// What the rows around a row see.
enum class Neighbours { SAME_TEXT, WINDOWS, OTHER_CELLS, RANDOM, COUNT };

struct Surroundings {
    Problem problem;
    int stream, row;
    std::vector<bool> is_own;  // of each cell
};

// A row all of whose cells are visible.
Problem lone_row() {
    Problem problem = random_shape();
    problem.num_cells = between(1, one_in(3) ? 200 : 2200);
    fill_with_numbers(problem);
    problem.masks.assign(problem.num_cells, 0.0f);
    if (problem.max_bias > 0.0f || one_in(4)) {
        for (float & mask : problem.masks) {
            mask = -(float) between(0, 100);
        }
    }
    return problem;
}

// own: how many of the row's cells there are up to this one.
bool neighbour_sees(Neighbours neighbours, bool is_own, int own, int last_own) {
    switch (neighbours) {
        case Neighbours::SAME_TEXT:
            return is_own && own <= last_own;
        case Neighbours::WINDOWS:
            return own <= last_own && own > last_own - 300;
        case Neighbours::OTHER_CELLS:
            return !is_own;
        default:
            return one_in(2);
    }
}

void place_masks(const Problem & alone, Surroundings & around) {
    Problem & problem = around.problem;
    const Neighbours neighbours = (Neighbours) between(0, (int) Neighbours::COUNT - 1);
    problem.masks.resize(problem.mask_at(problem.num_streams, 0, 0));
    for (int stream = 0; stream < problem.num_streams; ++stream) {
        for (int row = 0; row < problem.num_rows; ++row) {
            const bool is_the_row = stream == around.stream && row == around.row;
            int own = 0;
            for (int cell = 0; cell < problem.num_cells; ++cell) {
                const bool is_own = around.is_own[cell];
                float & mask = problem.masks[problem.mask_at(stream, 0, row) + cell];
                own += is_own;
                if (is_the_row) {
                    mask = is_own ? alone.masks[own - 1] : -INFINITY;
                } else if (neighbour_sees(neighbours, is_own, own, alone.num_cells + row - around.row)) {
                    mask = problem.max_bias > 0.0f ? -(float) between(0, 100) : 0.0f;
                } else {
                    mask = -INFINITY;
                }
            }
        }
    }
}

// Copies the row's cells in their order, and lets the others be no numbers at times: even if other rows see them.
void place_cells(const Problem & alone, Surroundings & around) {
    Problem & problem = around.problem;
    const bool is_poisoned = one_in(2);
    const auto place = [&](Numbers & to, const Numbers & from, int size, int cell, int own) {
        const int row_size = problem.num_kv_heads * size;
        float * row = to.data() + problem.cell_at(around.stream, cell) * size;
        if (around.is_own[cell]) {
            std::copy_n(from.data() + (size_t) own * row_size, row_size, row);
        } else if (is_poisoned) {
            std::fill_n(row, row_size, NAN);
        }
    };
    int own = 0;
    for (int cell = 0; cell < problem.num_cells; ++cell) {
        place(problem.keys, alone.keys, problem.key_size, cell, own);
        if (!problem.are_values_in_keys) {
            place(problem.values, alone.values, problem.value_size, cell, own);
        }
        own += around.is_own[cell];
    }
}

Surroundings random_surroundings(const Problem & alone) {
    Surroundings around;
    Problem & problem = around.problem = alone;
    problem.num_streams = one_of({1, 1, 2, 3});
    problem.num_rows = one_of({1, 1, 2, 3, 7, 24, 33, 63, 130});
    problem.num_cells = alone.num_cells + one_of({0, 0, 3, 200, 1500});
    around.stream = between(0, problem.num_streams - 1);
    around.row = between(0, problem.num_rows - 1);
    around.is_own.assign(problem.num_cells, false);
    std::fill_n(around.is_own.begin(), alone.num_cells, true);
    if (!one_in(3)) {
        std::shuffle(around.is_own.begin(), around.is_own.end(), random_bits);
    }
    fill_with_numbers(problem);
    place_masks(alone, around);
    place_cells(alone, around);
    for (int head = 0; head < problem.num_heads; ++head) {
        std::copy_n(
            alone.queries.data() + alone.query_at(0, head, 0), problem.key_size,
            problem.queries.data() + problem.query_at(around.stream, head, around.row));
    }
    return around;
}

bool is_same_row(const Surroundings & around, const Numbers & results, const Numbers & alone) {
    const float * row = results.data() + around.problem.result_at(around.stream, around.row, 0);
    return memcmp(row, alone.data(), alone.size() * sizeof(float)) == 0;
}

int test_invariance(int num_cases) {
    int num_compared = 0, num_different = 0;
    for (int number = 0; number < num_cases; ++number) {
        const Problem alone = lone_row();
        const Numbers expected = Graph(alone).result(1);
        if (std::all_of(alone.masks.begin(), alone.masks.end(), [](float mask) { return mask == 0.0f; })) {
            Problem without_mask = alone;
            without_mask.num_mask_heads = 0;
            without_mask.masks.clear();
            without_mask.max_bias = 0.0f;
            ++num_compared;
            if (Graph(without_mask).result(between(1, 4)) != expected) {
                ++num_different;
                printf("case %d differs without a mask: %s\n", number, description(alone).c_str());
            }
        }
        for (int i = 0; i < SURROUNDINGS; ++i) {
            const Surroundings around = random_surroundings(alone);
            const int num_threads = between(1, 4);
            ++num_compared;
            if (!is_same_row(around, Graph(around.problem).result(num_threads), expected)) {
                ++num_different;
                printf(
                    "case %d.%d differs: %d threads, row %d, stream %d, own cells %d: %s\n", number, i, num_threads,
                    around.row, around.stream, alone.num_cells, description(around.problem).c_str());
            }
        }
    }
    printf(
        "invariance: %d rows, %d comparisons, %d differ (version %d)\n", num_cases, num_compared, num_different,
        attention_rows_version());
    return num_different;
}

// ---- time ----

// Of the processor: others may use it meanwhile.
double seconds() { return (double) std::clock() / CLOCKS_PER_SEC; }

// Many copies in turn, so that cells are not in the processor's caches; the median of some rounds.
double seconds_per_run(std::vector<Graph *> & copies, bool is_enabled) {
    attention_rows_enable(is_enabled);
    std::vector<double> times;
    for (int round = 0; round < 5; ++round) {
        const double start = seconds();
        for (Graph * graph : copies) {
            graph->compute(1);
        }
        times.push_back((seconds() - start) / copies.size());
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

struct Case {
    int size, num_heads, num_kv_heads, num_rows, num_cells, window;
    ggml_type type;
};

void time_case(const Case & each) {
    Problem problem;
    problem.key_size = problem.value_size = each.size;
    problem.num_heads = each.num_heads;
    problem.num_kv_heads = each.num_kv_heads;
    problem.num_rows = each.num_rows;
    problem.num_cells = each.num_cells;
    problem.key_type = problem.value_type = each.type;
    problem.scale = 1.0f / std::sqrt((float) each.size);
    fill_with_numbers(problem);
    problem.masks.resize(problem.mask_at(1, 0, 0));
    for (int row = 0; row < problem.num_rows; ++row) {
        const int last = problem.num_cells - problem.num_rows + row;
        for (int cell = 0; cell < problem.num_cells; ++cell) {
            const bool is_visible = cell <= last && (each.window == 0 || cell > last - each.window);
            problem.masks[problem.mask_at(0, 0, row) + cell] = is_visible ? 0.0f : -INFINITY;
        }
    }
    const size_t cache_bytes = 2 * ggml_row_size(each.type, each.size) * each.num_kv_heads * each.num_cells;
    std::vector<Graph *> copies(std::max<size_t>(2, (96u << 20) / cache_bytes));
    for (Graph *& graph : copies) {
        graph = new Graph(problem);
    }
    const double of_ggml = seconds_per_run(copies, false), own = seconds_per_run(copies, true);
    const int visible = each.window > 0 ? each.window : each.num_cells;
    const double nanoseconds = 1e9 / ((double) each.num_heads * each.num_rows * visible);
    printf(
        "head %3d, heads %2d/%2d, rows %2d, cells %d, window %4d, %4s: %6.1f and %5.1f ns a head and position, "
        "%.1f times\n",
        each.size, each.num_heads, each.num_kv_heads, each.num_rows, each.num_cells, each.window,
        ggml_type_name(each.type), of_ggml * nanoseconds, own * nanoseconds, of_ggml / own);
    fflush(stdout);
    for (Graph * graph : copies) {
        delete graph;
    }
}

int measure_time() {
    const Case cases[] = {
        {64, 9, 3, 1, 4096, 0, GGML_TYPE_F16},    {64, 9, 3, 8, 4096, 0, GGML_TYPE_F16},
        {64, 9, 3, 32, 4096, 0, GGML_TYPE_F16},   {64, 9, 3, 1, 4096, 0, GGML_TYPE_Q8_0},
        {64, 9, 3, 8, 4096, 0, GGML_TYPE_Q8_0},   {64, 9, 3, 1, 4096, 0, GGML_TYPE_BF16},
        {128, 32, 8, 1, 4096, 0, GGML_TYPE_F16},  {128, 32, 8, 8, 4096, 0, GGML_TYPE_F16},
        {128, 16, 16, 1, 4096, 0, GGML_TYPE_F16}, {256, 8, 1, 1, 4096, 0, GGML_TYPE_F16},
        {64, 9, 3, 8, 4096, 1024, GGML_TYPE_F16}, {64, 9, 3, 128, 4096, 0, GGML_TYPE_F16},
        {128, 32, 8, 128, 4096, 0, GGML_TYPE_F16},
    };
    for (const Case & each : cases) {
        time_case(each);
    }
    return 0;
}

}  // namespace

int main(int argc, char ** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    const int num_cases = argc > 2 ? atoi(argv[2]) : 100;
    random_bits.seed(argc > 3 ? atoi(argv[3]) : 1);
    ggml_cpu_init();
    if (mode == "accuracy") {
        return test_accuracy(num_cases) != 0;
    }
    if (mode == "invariance") {
        return test_invariance(num_cases) != 0;
    }
    if (mode == "time") {
        return measure_time();
    }
    fprintf(stderr, "modes: accuracy N SEED, invariance N SEED, time\n");
    return 2;
}
