// Keeps the softmax of decode attention while its rows are read in parts, and joins the parts.
#pragma once
#include "rows.hpp"

// Keeps the running softmax of a head: its output is acc / sum(totals).
struct State {
    float top;   // the largest logit
    f32 totals;  // sum of the weights, per lane
    float* acc;  // [D], in an order of the reader's own
};

// Raises the largest logit, which is rare after the first blocks.
__attribute__((noinline)) inline void raise(const float* logits, State& state, int dim) {
    f32 best = load<f32>(logits);
    for (int t = LANES; t < TOKENS; t += LANES) best = maximum(best, load<f32>(logits + t));
    float top = largest(best), shrink = exp2(splat(state.top - top))[0];
    state.top = top;
    state.totals *= shrink;
    for (int c = 0; c < dim; c += LANES) store(state.acc + c, load<f32>(state.acc + c) * shrink);
}

// Turns the logits of a block into weights.
inline void weigh(float* logits, State& state, int dim) {
    i32 above = {};
    for (int t = 0; t < TOKENS; t += LANES) above |= load<f32>(logits + t) > state.top;
    if (any(above)) raise(logits, state, dim);
    for (int t = 0; t < TOKENS; t += LANES) {
        f32 w = exp2(load<f32>(logits + t) - state.top);
        state.totals += w;
        store(logits + t, w);
    }
}

// Merges the parts of one head, `stride` states apart, into the first. Returns the sum that its values are to be divided
// by, and writes the log-sum-exp where one is wanted.
inline float join(State* state, int64_t parts, int64_t stride, int64_t dim, float* lse) {
    float top = -INFINITY, total = 0;
    for (int64_t i = 0; i < parts; i++) top = std::max(top, state[i * stride].top);
    for (int64_t i = 0; i < parts; i++) {
        State& part = state[i * stride];
        float share = std::exp2(part.top - top);
        total += share * sum(part.totals);
        for (int64_t c = 0; c < dim; c += LANES) {
            f32 scaled = load<f32>(part.acc + c) * share;
            store(state->acc + c, i ? load<f32>(state->acc + c) + scaled : scaled);
        }
    }
    if (lse) *lse = (top + std::log2(total)) * (float)M_LN2;
    return total;
}
