// Runs Lloyd's iterations for many small problems at once. A round reads each point once: a matrix product with 64
// centroids at a time finds the nearest one, and the point is added to its sum while still in cache.
#include "calls.hpp"
#include "tiles.hpp"

namespace {

constexpr int WIDE = 64;  // centroids per tile
constexpr int VECTORS = WIDE / LANES;
constexpr int64_t POINTS = 4096;  // points of a task; sums are merged in a fixed order, whatever the number of threads

struct Problem {
    const float* x;    // [P d]
    float* centroids;  // [C d]
    int32_t* codes;    // [P]
    int64_t points, dim, clusters, tiles, tasks;
    Buffer<float> columns;     // [tiles][d][WIDE], the centroids; padding is zero
    Buffer<float> half_norms;  // [tiles * WIDE], infinite for padding
    Buffer<float> sums;        // [tasks][C d]
    Buffer<int32_t> counts;    // [tasks][C]
    Buffer<float> moments;     // [tasks][2][d]
    double shift = 0, bound = 0;    // squared movement of the centroids in a round, and the bound below which it stops

    void start(const float* first_x, float* first_centroids, int32_t* first_codes, int64_t i) {
        x = first_x + i * points * dim, centroids = first_centroids + i * clusters * dim;
        codes = first_codes + i * points;
        columns.resize(tiles * dim * WIDE);
        half_norms.resize(tiles * WIDE);
        sums.resize(tasks * clusters * dim);
        counts.resize(tasks * clusters);
        moments.resize(tasks * 2 * dim);
    }

    void arrange() {
        std::fill(half_norms.begin(), half_norms.end(), INFINITY);
        for (int64_t c = 0; c < clusters; c++) {
            float norm = 0;
            for (int64_t d = 0; d < dim; d++) {
                float value = centroids[c * dim + d];
                columns[(c / WIDE * dim + d) * WIDE + c % WIDE] = value;
                norm += value * value;
            }
            half_norms[c] = norm / 2;
        }
    }

    // Finds the nearest centroids of four points.
    void nearest(const uint32_t* const* rows, int32_t* code) const {
        f32 best[TILE_ROWS];
        i32 where[TILE_ROWS], lane = numbers();
        for (int r = 0; r < TILE_ROWS; r++) best[r] = splat(-INFINITY), where[r] = lane;
        for (int64_t tile = 0; tile < tiles; tile++) {
            f32 scores[TILE_ROWS][VECTORS] = {};
            multiply<F32, VECTORS>(rows, (const uint32_t*)&columns[tile * dim * WIDE], WIDE, dim, scores);
            UNROLL for (int i = 0; i < VECTORS; i++) {
                f32 norms = load<f32>(&half_norms[tile * WIDE + i * LANES]);
                UNROLL for (int r = 0; r < TILE_ROWS; r++) {
                    f32 score = scores[r][i] - norms;
                    i32 better = score > best[r];
                    best[r] = select(better, score, best[r]);
                    where[r] = select(better, lane + (int32_t)(tile * WIDE + i * LANES), where[r]);
                }
            }
        }
        for (int r = 0; r < TILE_ROWS; r++) {
            i32 first = select(best[r] == largest(best[r]), where[r], i32{} + INT32_MAX);  // of equal ones the first
            code[r] = smallest(first);
        }
    }

    void assign(int64_t task, bool add) {
        int64_t first = task * POINTS, last = std::min(first + POINTS, points);
        float* sum = &sums[task * clusters * dim];
        int32_t* count = &counts[task * clusters];
        if (add) std::fill_n(sum, clusters * dim, 0.0f), std::fill_n(count, clusters, 0);
        for (int64_t p = first; p < last; p += TILE_ROWS) {
            int n = std::min<int64_t>(TILE_ROWS, last - p);
            const uint32_t* rows[TILE_ROWS];
            for (int r = 0; r < TILE_ROWS; r++) rows[r] = (const uint32_t*)(x + (p + std::min(r, n - 1)) * dim);
            int32_t code[TILE_ROWS];
            nearest(rows, code);
            for (int r = 0; r < n; r++) {
                codes[p + r] = code[r];
                if (!add) continue;
                float* to = sum + code[r] * dim;
                const float* from = x + (p + r) * dim;
                int64_t d = 0;
                for (; d + LANES <= dim; d += LANES) store(to + d, load<f32>(to + d) + load<f32>(from + d));
                for (; d < dim; d++) to[d] += from[d];
                count[code[r]]++;
            }
        }
    }

    // Sums a task's points, relative to the first point, and their squares.
    void measure(int64_t task) {
        int64_t first = task * POINTS, last = std::min(first + POINTS, points);
        float* sum = &moments[task * 2 * dim];
        for (int64_t p = first; p < last; p++)
            for (int64_t d = 0; d < dim; d++) {
                float by = x[p * dim + d] - x[d];
                sum[d] += by;
                sum[dim + d] += by * by;
            }
    }
    double mean_variance() const {
        double total = 0;
        for (int64_t d = 0; d < dim; d++) {
            double sum = 0, squares = 0;
            for (int64_t task = 0; task < tasks; task++)
                sum += moments[(task * 2) * dim + d], squares += moments[(task * 2 + 1) * dim + d];
            total += squares / points - sum / points * (sum / points);
        }
        return total / dim;
    }

    // Moves centroids to the means of their points; one without points stays.
    void move() {
        shift = 0;
        for (int64_t c = 0; c < clusters; c++) {
            int64_t count = 0;
            for (int64_t task = 0; task < tasks; task++) count += counts[task * clusters + c];
            if (!count) continue;
            for (int64_t d = 0; d < dim; d++) {
                double sum = 0;
                for (int64_t task = 0; task < tasks; task++) sum += sums[(task * clusters + c) * dim + d];
                float mean = sum / count, by = mean - centroids[c * dim + d];
                shift += by * by;
                centroids[c * dim + d] = mean;
            }
        }
    }
};

}  // namespace

// Stops after `iterations` rounds, or once every problem's movement is at most `tolerance` times the mean variance of
// its points.
EXPORT void kmeans(const KMeans& call) {
    const int64_t problems = call.problems, iterations = call.iterations;
    const double tolerance = call.tolerance;
    Problem like{};
    like.points = call.points, like.dim = call.dim, like.clusters = call.clusters;
    like.tiles = (call.clusters + WIDE - 1) / WIDE, like.tasks = (call.points + POINTS - 1) / POINTS;
    std::vector<Problem> all(problems, like);
    for (int64_t i = 0; i < problems; i++) all[i].start(call.x, call.centroids, call.codes, i);
    int64_t tasks = problems * like.tasks;
    bool more = iterations > 0;
#pragma omp parallel
    {
        if (tolerance > 0) {
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < tasks; i++) all[i / like.tasks].measure(i % like.tasks);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < problems; i++) all[i].bound = tolerance * all[i].mean_variance();
        }
        for (int64_t round = 0;; round++) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < problems; i++) all[i].arrange();
            bool add = more;
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < tasks; i++) all[i / like.tasks].assign(i % like.tasks, add);
            if (!add) break;
#pragma omp for schedule(static)
            for (int64_t i = 0; i < problems; i++) all[i].move();
#pragma omp single
            {
                more = false;
                for (const Problem& problem : all) more |= !(problem.shift <= problem.bound);
                more &= round + 1 < iterations;
            }
        }
    }
}
