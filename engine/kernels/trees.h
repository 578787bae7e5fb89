// Trees of guesses: draws without replacement, and the rules. decoding/tree.py and decoding/treeRules.py define what
// these compute.
#pragma once
#include "sampling.h"

// The operator `siblings` of decoding/tree.py: q [B, m, V], u [B, m, K], counts [m] -> tokens int64 [B, sum(counts)], and
// the laws that they were drawn from, [B, sum(counts), V].
static std::tuple<at::Tensor, at::Tensor> siblings(const at::Tensor& q, const at::Tensor& u, at::IntArrayRef counts) {
    auto qs = q.contiguous(), us = u.contiguous();
    long rows = q.size(0), nodes = q.size(1), size = q.size(2), most = u.size(2), drawn = 0;
    for (long count : counts) drawn += count;
    auto tokens = at::empty({rows, drawn}, u.options().dtype(at::kLong));
    auto laws = at::empty({rows, drawn, size}, q.options());
    std::vector<double> parts;
    auto* token = (int64_t*)tokens.data_ptr();
    float* law = (float*)laws.data_ptr();
    const float *from = data<float>(qs), *at = data<float>(us);
    for (long node = 0; node < rows * nodes; node++, from += size, at += most) {
        long count = counts[node % nodes];
        for (long k = 0; k < count; k++, law += size, token++) {
            if (k == 0 || is_nan(from)) {
                std::copy(from, from + size, law);
                *token = pick_one(law, size, at[k], parts);
                continue;
            }
            std::copy(law - size, law, law);
            law[token[-1]] = 0;
            float left = total(law, size);
            if (left > 0)
                for (long v = 0; v < size; v++) law[v] /= left;
            *token = left > 0 ? pick_one(law, size, at[k], parts) : token[-k];
        }
    }
    return {tokens, laws};
}

// One row of a tree whose nodes 0 to n are asked in depth-first order, as long as no path is accepted.
struct Walk {
    const float *p, *q, *u;  // [n + 1, V], [n, V], [n]
    const int64_t* drafts;   // [n]
    const std::vector<std::vector<long>>& children;
    long size;                              // V
    std::vector<std::vector<float>>& room;  // for what is left of the masses, by depth
    std::vector<long> path;                 // the nodes from the root to the one asked
    const float* left = nullptr;            // once a path is accepted: the distribution of the token, times some number

    // What is left of the mass of a node: weight is its sum, and its numbers are scale times those at `left`.
    struct Mass {
        const float* left;
        double scale, weight;
    };

    // w_x = min(1, m(x) / q(x)) of a child of a node with this mass; -1 if there is no such child.
    double ratio(const Mass& mass, long child) const {
        const float* law = q + (child - 1) * size;
        if (is_nan(law) || is_nan(mass.left)) return -1;
        float x = law[drafts[child - 1]];
        return x > 0 ? std::min(1.0, mass.scale * mass.left[drafts[child - 1]] / x) : -1;
    }

    // The mass after a child was rejected: max(0, m - q) / (1 - sum min(m, q)).
    void reject(Mass& mass, long child) {
        if (room.size() < path.size()) room.resize(path.size());
        auto& to = room[path.size() - 1];
        if (long(to.size()) < size) to.resize(size);
        const float *from = mass.left, *law = q + (child - 1) * size;
        float scale = float(mass.scale), sum = 0;
        for (long v = 0; v < size; v++) {
            float x = std::max(scale * from[v] - law[v], 0.f);
            to[v] = x;
            sum += x;
        }
        double rejected = std::max({sum + (1 - mass.weight), double(sum), 1e-37});
        mass = {to.data(), 1 / rejected, sum / rejected};
    }

    bool accept(const Mass& mass, long node) {
        left = mass.weight > 0 ? mass.left : p + node * size;  // Nothing is left where p equals q up to rounding.
        return true;
    }

    // traversal_rule, for a node that must accept with probability `weight`. Returns whether a path was accepted.
    bool traverse(long node, double weight) {
        Mass mass{p + node * size, weight, weight};
        path.push_back(node);
        for (long child : children[node]) {
            double w = ratio(mass, child);
            if (w < 0) continue;
            if (w > 0 && traverse(child, w)) return true;
            reject(mass, child);
        }
        if (!node || u[node - 1] < mass.weight) return accept(mass, node);
        path.pop_back();
        return false;
    }

    // top_down_rule, from a node that was accepted.
    bool descend(long node) {
        Mass mass{p + node * size, 1, 1};
        path.push_back(node);
        for (long child : children[node]) {
            double w = ratio(mass, child);
            if (w < 0) continue;
            if (u[child - 1] < w) return descend(child);
            reject(mass, child);
        }
        return accept(mass, node);
    }
};

// The operator `accept_tree`, the rules of decoding/treeRules.py without the last draw: p [B, n + 1, V], q [B, n, V],
// drafts int64 [B, n], u [B, n], the parents of nodes 1 to n, the tree's depth, and whether it is traversal_rule -> how
// many guesses are accepted, int64 [B], their nodes, int64 [B, depth], and the distribution of the token times some
// number, [B, V].
static std::tuple<at::Tensor, at::Tensor, at::Tensor> accept_tree(const at::Tensor& p, const at::Tensor& q,
                                                                  const at::Tensor& drafts, const at::Tensor& u,
                                                                  at::IntArrayRef parents, int64_t depth,
                                                                  bool traversal) {
    auto ps = p.contiguous(), qs = q.contiguous(), xs = drafts.contiguous(), us = u.contiguous();
    check_drafts(qs, xs);
    long rows = p.size(0), n = drafts.size(1), size = p.size(2);
    auto accepted = at::empty({rows}, drafts.options()), path = at::empty({rows, depth}, drafts.options());
    auto left = at::empty({rows, size}, p.options());
    std::vector<std::vector<long>> children(n + 1);
    for (long i = 0; i < n; i++) children[parents[i]].push_back(i + 1);
    static thread_local std::vector<std::vector<float>> room;
    for (long row = 0; row < rows; row++) {
        Walk walk{data<float>(ps) + row * (n + 1) * size, data<float>(qs) + row * n * size,
                  data<float>(us) + row * n, data<int64_t>(xs) + row * n, children, size, room, {}};
        traversal ? walk.traverse(0, 1) : walk.descend(0);
        auto* nodes = (int64_t*)path.data_ptr() + row * depth;
        std::fill(nodes, nodes + depth, 0);
        std::copy(walk.path.begin() + 1, walk.path.end(), nodes);
        ((int64_t*)accepted.data_ptr())[row] = walk.path.size() - 1;
        std::copy(walk.left, walk.left + size, (float*)left.data_ptr() + row * size);
    }
    return {accepted, path, left};
}
