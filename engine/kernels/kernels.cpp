// The operators on which decoding on a CPU spends its time.
#include "decoder.h"
#include "sampling.h"
#include "trees.h"

void pack(const at::Tensor& weight, const at::Tensor& packed);

// The operator `move`: copies the slots source[B, m] of each kept [rows, G, capacity, d] to slots[B, m], in B rows from
// the first one on. All are read before any is written.
static void move_slots(const at::TensorList& all, const at::Tensor& source, const at::Tensor& slots, int64_t first_row) {
    auto from = source.contiguous(), to = slots.contiguous();
    long m = from.size(1);
    std::vector<char> room;
    for (const auto& kept : all) {
        long groups = kept.size(1), capacity = kept.size(2), bytes = kept.size(3) * kept.element_size();
        TORCH_CHECK(0 <= first_row && first_row + from.size(0) <= kept.size(0), "the KV cache has ", kept.size(0), " rows");
        room.resize(m * bytes);
        for (long bg = 0; bg < from.size(0) * groups; bg++) {
            const int64_t *first = data<int64_t>(from) + bg / groups * m, *last = data<int64_t>(to) + bg / groups * m;
            char* head = (char*)kept.data_ptr() + (first_row * groups + bg) * capacity * bytes;
            for (long i = 0; i < m; i++) {
                TORCH_CHECK(0 <= first[i] && first[i] < capacity && 0 <= last[i] && last[i] < capacity,
                            "there is no slot ", first[i], " or ", last[i]);
                std::memcpy(room.data() + i * bytes, head + first[i] * bytes, bytes);
            }
            for (long i = 0; i < m; i++) std::memcpy(head + last[i] * bytes, room.data() + i * bytes, bytes);
        }
    }
}

TORCH_LIBRARY(native, library) {
    library.class_<Decoder>("Decoder")
        .def(torch::init<const c10::List<Named>&, const Named&, const c10::Dict<std::string, int64_t>&,
                         const c10::Dict<std::string, double>&>())
        .def("bind", &Decoder::bind)
        .def("forward", &Decoder::forward)
        .def("draw", &Decoder::draw);
    library.def("move(Tensor(a!)[] kept, Tensor source, Tensor slots, int first_row) -> ()");
    library.def("probabilities(Tensor logits, Tensor settings, Tensor? counts) -> Tensor");
    library.def("pick(Tensor probs, Tensor u) -> Tensor");
    library.def("siblings(Tensor q, Tensor u, int[] counts) -> (Tensor, Tensor)");
    library.def("accept(Tensor p, Tensor q, Tensor drafts, Tensor u) -> (Tensor, Tensor)");
    library.def("accept_block(Tensor p, Tensor q, Tensor drafts, Tensor u) -> (Tensor, Tensor)");
    library.def("accept_tree(Tensor p, Tensor q, Tensor drafts, Tensor u, int[] parents, int depth, bool traversal) -> "
                "(Tensor, Tensor, Tensor)");
    library.def("pack(Tensor weight, Tensor(a!) packed) -> ()");
}

TORCH_LIBRARY_IMPL(native, CPU, library) {
    library.impl("move", [](at::TensorList all, const at::Tensor& source, const at::Tensor& slots, int64_t first_row) {
        move_slots(all, source, slots, first_row);
    });
    library.impl("probabilities", probabilities);
    library.impl("pick", pick);
    library.impl("siblings", siblings);
    library.impl("accept", accept);
    library.impl("accept_block", accept_block);
    library.impl("accept_tree", accept_tree);
    library.impl("pack", pack);
}
