// Tree attention on CPU: dense pieces (causal squares and full rectangles) through torch's flash kernel, merged by
// log-sum-exp. Each piece reads slices of the inputs; no mask and no gathered copy of keys ever exists.
#include <torch/library.h>
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include <cmath>
#include <limits>
#include <tuple>

namespace {

struct Piece {
  int64_t query, key, queries, keys;
  bool causal;
};

Piece piece_at(const int64_t* row) { return {row[0], row[1], row[2], row[3], row[4] != 0}; }

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& pieces) {
  TORCH_CHECK_VALUE(q.dim() == 3 && k.dim() == 3 && v.dim() == 3,
                    "tree_attention takes [heads, tokens, size]; found ", q.sizes(), k.sizes(), v.sizes());
  TORCH_CHECK_VALUE(q.size(0) % k.size(0) == 0, "query heads ", q.size(0),
                    " are not a multiple of key-value heads ", k.size(0));
  TORCH_CHECK_VALUE(q.scalar_type() == k.scalar_type() && k.scalar_type() == v.scalar_type(),
                    "query, key and value differ in type: ", q.scalar_type(), k.scalar_type(), v.scalar_type());
  TORCH_CHECK_VALUE(pieces.dim() == 2 && pieces.size(1) == 5 && pieces.scalar_type() == at::kLong &&
                        pieces.is_contiguous(),
                    "pieces must be contiguous int64 [P, 5]; found ", pieces.sizes(), " ", pieces.scalar_type());
  const auto* row = pieces.const_data_ptr<int64_t>();
  for (int64_t p = 0; p < pieces.size(0); ++p, row += 5) {
    const Piece x = piece_at(row);
    TORCH_CHECK_INDEX(x.query >= 0 && x.key >= 0 && x.queries > 0 && x.keys > 0 && x.query + x.queries <= q.size(1) &&
                          x.key + x.keys <= k.size(1) && (!x.causal || x.queries == x.keys),
                      "piece ", p, " does not fit ", q.size(1), " queries and ", k.size(1), " keys");
  }
}

at::Tensor slice(const at::Tensor& x, int64_t start, int64_t length) { return x.narrow(1, start, length).unsqueeze(0); }

// Merge one piece's output into the running softmax: out and lse are what the pieces so far give.
template <typename scalar_t>
void merge(at::Tensor& out, at::Tensor& lse, const at::Tensor& piece_out, const at::Tensor& piece_lse, int64_t start) {
  const int64_t heads = out.size(0), size = out.size(2), rows = piece_out.size(1);
  const int64_t lse_head = piece_lse.stride(0), lse_row = piece_lse.stride(1);
  const int64_t po_head = piece_out.stride(0), po_row = piece_out.stride(1);
  const auto* po = piece_out.const_data_ptr<scalar_t>();
  const auto* pl = piece_lse.const_data_ptr<float>();
  auto* o = out.mutable_data_ptr<float>();
  auto* l = lse.mutable_data_ptr<float>();
  at::parallel_for(0, heads * rows, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i / rows, r = i % rows;
      float& total = l[h * lse.size(1) + start + r];
      const float add = pl[h * lse_head + r * lse_row];
      const scalar_t* from = po + h * po_head + r * po_row;
      float* to = o + (h * out.size(1) + start + r) * size;
      if (total == -std::numeric_limits<float>::infinity()) {
        for (int64_t d = 0; d < size; ++d) to[d] = static_cast<float>(from[d]);
        total = add;
        continue;
      }
      const float peak = std::max(total, add);
      const float merged = peak + std::log(std::exp(total - peak) + std::exp(add - peak));
      const float keep = std::exp(total - merged), take = std::exp(add - merged);
      for (int64_t d = 0; d < size; ++d) to[d] = to[d] * keep + static_cast<float>(from[d]) * take;
      total = merged;
    }
  });
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                           const at::Tensor& pieces, double scale) {
  check(q, k, v, pieces);
  auto out = at::zeros(q.sizes(), q.options().dtype(at::kFloat));
  auto lse = at::full({q.size(0), q.size(1)}, -std::numeric_limits<float>::infinity(), out.options());
  const auto* row = pieces.const_data_ptr<int64_t>();
  for (int64_t p = 0; p < pieces.size(0); ++p, row += 5) {
    const Piece x = piece_at(row);
    auto [o, l] = at::_scaled_dot_product_flash_attention_for_cpu(slice(q, x.query, x.queries), slice(k, x.key, x.keys),
                                                                 slice(v, x.key, x.keys), 0.0, x.causal, {}, scale);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, q.scalar_type(), "tree_attention_merge",
                                    [&] { merge<scalar_t>(out, lse, o[0], l[0], x.query); });
  }
  return {out.to(q.scalar_type()), lse};
}

// With the merged output and log-sum-exp, each piece's backward is exact on its own and the pieces add up.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad, const at::Tensor& q,
                                                        const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                                        const at::Tensor& lse, const at::Tensor& pieces, double scale) {
  check(q, k, v, pieces);
  auto dq = at::zeros(q.sizes(), q.options().dtype(at::kFloat));
  auto dk = at::zeros(k.sizes(), dq.options());
  auto dv = at::zeros(v.sizes(), dq.options());
  const auto* row = pieces.const_data_ptr<int64_t>();
  for (int64_t p = 0; p < pieces.size(0); ++p, row += 5) {
    const Piece x = piece_at(row);
    auto [gq, gk, gv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        slice(grad, x.query, x.queries), slice(q, x.query, x.queries), slice(k, x.key, x.keys),
        slice(v, x.key, x.keys), slice(out, x.query, x.queries), slice(lse, x.query, x.queries), 0.0, x.causal, {},
        scale);
    dq.narrow(1, x.query, x.queries).add_(gq[0]);
    dk.narrow(1, x.key, x.keys).add_(gk[0]);
    dv.narrow(1, x.key, x.keys).add_(gv[0]);
  }
  return {dq.to(q.scalar_type()), dk.to(k.scalar_type()), dv.to(v.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gyre, m) {
  m.def("tree_attention_forward(Tensor query, Tensor key, Tensor value, Tensor pieces, float scale) -> (Tensor, Tensor)");
  m.def(
      "tree_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sums, "
      "Tensor pieces, float scale) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(gyre, CPU, m) {
  m.impl("tree_attention_forward", forward);
  m.impl("tree_attention_backward", backward);
}
