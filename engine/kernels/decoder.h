// `Decoder`: a causal language model as the kernels compute it. decoderLayers.py describes one.
#pragma once
#include "attention.h"
#include "linear.h"

#include <torch/custom_class.h>

#include <optional>
#include <string>

using Named = c10::Dict<std::string, at::Tensor>;

// Layer normalisation with or without a mean (RMS).
struct Norm {
    at::Tensor weight, bias;  // in the model's dtype or float32
    bool rms = false;
    float eps = 0;
    bool absent = true;

    long size() const { return absent ? 0 : weight.numel(); }
};

struct Layer {
    Norm before_attention, after_attention, before_mlp, after_mlp;  // after: of what is added to the hidden states
    Norm query, key;                                                // of each head, or of all heads together
    Linear qkv, out, up, down;
    bool windowed;
    long table;  // of rotary embeddings; -1: positions are not used
};

class Decoder : public torch::CustomClassHolder {
  public:
    Decoder(const c10::List<Named>& layers, const Named& ends, const c10::Dict<std::string, int64_t>& sizes,
            const c10::Dict<std::string, double>& numbers);

    // From now on, the KV cache is keys, values [L][B, G, capacity, D], and cos, sin [tables, capacity, R] are those of the
    // positions up to the capacity. features float32 [B, capacity + 1, hidden]: a decoder with a tap writes that of the
    // token in slot s to s + 1, and a head reads at s what its token in slot s needs, that of the token before it. Without
    // them, a tap is not computed.
    void bind(std::vector<at::Tensor> keys, std::vector<at::Tensor> values, at::Tensor cos, at::Tensor sin,
              std::optional<at::Tensor> features);

    // Model.forward of decoding/model.py. slots int64 [B, n], root int64 [B] and ancestors int64 [n] if the tokens are
    // nodes of a tree. keep: int64 [K], or [B, K] for each row its own. counts int64 [B]: only the first counts[b] tokens
    // of row b are computed; the logits of the others are 0, and none of their keys and values are written. Row b of the
    // block is row first_row + b of the KV cache. A head writes its last hidden state as the feature of the last token of
    // each row, or of every node, unless `keep` is given: then the block is a text whose features are known.
    at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions, const std::optional<at::Tensor>& slots,
                       const std::optional<at::Tensor>& root, const std::optional<at::Tensor>& ancestors,
                       const std::optional<at::Tensor>& keep, const std::optional<at::Tensor>& counts,
                       int64_t first_row);

    // Model.draw of decoding/model.py. settings: see `probabilities`. counts int64 [B]: row b draws counts[b] tokens; of a
    // row that draws none, nothing is read. Beyond them, tokens and distributions are 0. first_row: as above.
    std::tuple<at::Tensor, at::Tensor> draw(const at::Tensor& tokens, const at::Tensor& positions, const at::Tensor& u,
                                            const at::Tensor& settings, const std::optional<at::Tensor>& counts,
                                            int64_t first_row);

  private:
    struct Block;
    at::Tensor read(const at::Tensor& tokens, const at::Tensor& positions, const std::optional<at::Tensor>& slots,
                    const std::optional<at::Tensor>& root, const std::optional<at::Tensor>& ancestors,
                    const std::optional<at::Tensor>& keep, const std::optional<at::Tensor>& counts, int64_t first_row,
                    bool guesses);
    template <typename T> void run(Block& block);
    // Where the feature number `at` of a row of the KV cache is.
    float* feature(long row, long at) const { return (float*)features.data_ptr() + (row * features.size(1) + at) * hidden; }
    bool is_head() const { return join.packed.defined(); }
    bool is_tapped() const { return taps.defined() && features.defined(); }
    template <typename T> struct Room;
    template <typename T> struct Pass;

    std::vector<Layer> layers;
    at::Tensor embedding, places, cos, sin, kept;  // places: position embeddings; kept: the tokens of a restricted head
    Norm last;
    Linear head;
    at::Tensor features, taps;  // taps int64: the layers after which hidden states are tapped (0: the embeddings)
    Linear fuse, join;          // fuse: tapped states to a feature. join: of a head, a token and a feature to its input
    Norm token_norm, feature_norm;  // of what `join` joins
    std::vector<at::Tensor> keys, values;
    long hidden, heads, groups, width, rotary, vocabulary, offset, activation, window;
    bool parallel, gated;
    Scores scores;
    float embedding_scale, residual_scale;  // of embeddings; of what a layer adds to the hidden states
    Scores logit_scores;                    // logits of what the output layer computes
};
