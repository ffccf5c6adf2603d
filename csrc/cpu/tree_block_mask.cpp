// FlexAttention's block tables of a packed tree, in O(nodes + blocks + nonzero blocks): no token-by-token mask, no
// block-by-block test.
//
// Scanning query blocks downwards, the key blocks that are seen whole form a stack (subtrees nest), so a row of the
// table is one copy of the stack. Key blocks seen in part are few: those that hold a node boundary of the path.
#include <torch/library.h>
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "tree_blocks.h"

namespace {

using gyre::ColumnBounds;
using Tables = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

struct Span {
  int32_t first, last;
};

void check(const at::Tensor& starts, const at::Tensor& ends, const at::Tensor& subtree_ends, int64_t num_tokens,
           int64_t block) {
  for (const auto* t : {&starts, &ends, &subtree_ends})
    TORCH_CHECK_VALUE(t->dim() == 1 && t->scalar_type() == at::kInt && t->is_contiguous() && t->size(0) == starts.size(0),
                      "tree_block_mask takes contiguous int32 [nodes]; found ", t->sizes(), " ", t->scalar_type());
  TORCH_CHECK_VALUE(block >= 1 && num_tokens >= 1, "block ", block, " and num_tokens ", num_tokens, " must be positive");
  const auto *s = starts.const_data_ptr<int32_t>(), *e = ends.const_data_ptr<int32_t>(),
             *u = subtree_ends.const_data_ptr<int32_t>();
  int32_t cursor = 0;
  for (int64_t n = 0; n < starts.size(0); ++n) {
    TORCH_CHECK_VALUE(s[n] == cursor && e[n] > s[n] && u[n] >= e[n] && u[n] <= num_tokens, "node ", n,
                      " does not follow the one before it in DFS order");
    cursor = e[n];
  }
  TORCH_CHECK_VALUE(cursor == num_tokens, "nodes end at token ", cursor, " of ", num_tokens);
}

std::vector<ColumnBounds> bounds_of(const at::Tensor& starts, const at::Tensor& ends, const at::Tensor& subtree_ends,
                                    int32_t num_blocks, int32_t block) {
  std::vector<int32_t> low(num_blocks, INT32_MAX), high(num_blocks, 0);
  const auto *s = starts.const_data_ptr<int32_t>(), *e = ends.const_data_ptr<int32_t>(),
             *u = subtree_ends.const_data_ptr<int32_t>();
  for (int64_t n = 0; n < starts.size(0); ++n)
    for (int32_t b = s[n] / block; b <= (e[n] - 1) / block; ++b) {
      low[b] = std::min(low[b], u[n]);
      high[b] = std::max(high[b], u[n]);
    }
  std::vector<ColumnBounds> bounds(num_blocks);
  for (int32_t b = 0; b < num_blocks; ++b) bounds[b] = gyre::column_bounds(b, low[b], high[b], block);
  return bounds;
}

// Calls row(i, whole, partial) for every query block, ascending; both lists ascending, `partial` without the diagonal.
template <typename Row>
void scan_rows(const std::vector<ColumnBounds>& bounds, Row&& row) {
  std::vector<int32_t> whole, partial;
  for (int32_t i = 0; i < static_cast<int32_t>(bounds.size()); ++i) {
    while (!whole.empty() && bounds[whole.back()].full_until <= i) {
      const int32_t j = whole.back();
      whole.pop_back();
      partial.insert(std::lower_bound(partial.begin(), partial.end(), j), j);
    }
    std::erase_if(partial, [&](int32_t j) { return bounds[j].partial_until <= i; });
    row(i, whole, partial);
    if (bounds[i].full_until > i + 1)
      whole.push_back(i);
    else if (bounds[i].partial_until > i + 1)
      partial.push_back(i);
  }
}

// A table over memory that is either fresh or, where it is large enough, that of an earlier call.
struct Table {
  at::Tensor counts, indices;
  int32_t *count, *index;
  int64_t width;

  // `full` is the width FlexAttention expects (all blocks); memory is only as wide as the longest row, and the rows of
  // the view overlap beyond their counts, where nothing is read.
  Table(int64_t rows, int64_t width_, int64_t full, const at::Tensor& like, at::Tensor& scratch)
      : width(std::max<int64_t>(width_, 1)) {
    counts = take(rows, like, scratch).view({1, 1, rows});
    const int64_t tail = std::max<int64_t>(full - width, 0);
    indices = take(rows * width + tail, like, scratch);
    index = indices.mutable_data_ptr<int32_t>();
    indices = indices.as_strided({1, 1, rows, std::max(full, width)}, {rows * width, rows * width, width, 1});
    count = counts.mutable_data_ptr<int32_t>();
  }

  int32_t* row(int64_t r) { return index + r * width; }

  static at::Tensor take(int64_t size, const at::Tensor& like, at::Tensor& scratch) {
    if (!scratch.defined() || scratch.numel() < size) return at::empty({size}, like.options());
    auto taken = scratch.narrow(0, 0, size);
    scratch = scratch.narrow(0, size, scratch.numel() - size);
    return taken;
  }
};

// Key blocks that each query block sees whole and in part, from the ends of the columns' intervals.
std::pair<std::vector<int32_t>, std::vector<int32_t>> row_counts(const std::vector<ColumnBounds>& bounds) {
  const size_t n = bounds.size();
  std::vector<int32_t> whole(n + 2), partial(n + 2);
  for (size_t j = 0; j < n; ++j) {
    ++whole[j + 1], --whole[bounds[j].full_until];
    ++partial[bounds[j].full_until], --partial[bounds[j].partial_until];
  }
  std::partial_sum(whole.begin(), whole.end(), whole.begin());
  std::partial_sum(partial.begin(), partial.end(), partial.begin());
  return {whole, partial};
}

// Key-value tables: one row per query block held here.
std::pair<Table, Table> key_tables(const std::vector<ColumnBounds>& bounds, const std::vector<int32_t>& held,
                                   const at::Tensor& like, at::Tensor& scratch) {
  const auto [whole_counts, partial_counts] = row_counts(bounds);
  int32_t most_partial = 0, most_whole = 0;
  for (const int32_t i : held) {
    most_partial = std::max(most_partial, partial_counts[i] + 1);
    most_whole = std::max(most_whole, whole_counts[i]);
  }
  const auto rows = static_cast<int64_t>(held.size()), full = static_cast<int64_t>(bounds.size());
  Table some(rows, most_partial, full, like, scratch), all(rows, most_whole, full, like, scratch);
  size_t r = 0;
  scan_rows(bounds, [&](int32_t i, const auto& whole, const auto& partial) {
    if (r == held.size() || held[r] != i) return;
    std::copy(partial.begin(), partial.end(), some.row(r));
    some.row(r)[partial.size()] = i;
    some.count[r] = static_cast<int32_t>(partial.size()) + 1;
    std::copy(whole.begin(), whole.end(), all.row(r));
    all.count[r++] = static_cast<int32_t>(whole.size());
  });
  return {some, all};
}

// Query tables: one row per key block, in local numbers of the query blocks held here.
std::pair<Table, Table> query_tables(const std::vector<ColumnBounds>& bounds, const std::vector<int32_t>& held,
                                     const at::Tensor& like, at::Tensor& scratch) {
  const auto n = static_cast<int32_t>(bounds.size());
  std::vector<int32_t> place(n + 1);  // query blocks held before block i
  for (int32_t i = 0, r = 0; i <= n; ++i) {
    place[i] = r;
    if (r < static_cast<int32_t>(held.size()) && held[r] == i) ++r;
  }
  auto whole = [&](int32_t j) { return Span{place[std::min(j + 1, n)], place[bounds[j].full_until]}; };
  auto partial = [&](int32_t j) { return Span{place[bounds[j].full_until], place[bounds[j].partial_until]}; };
  int32_t most_partial = 0, most_whole = 0;
  for (int32_t j = 0; j < n; ++j) {
    most_whole = std::max(most_whole, whole(j).last - whole(j).first);
    most_partial = std::max(most_partial, 1 + partial(j).last - partial(j).first);
  }
  const auto full = static_cast<int64_t>(held.size());
  Table some(n, most_partial, full, like, scratch), all(n, most_whole, full, like, scratch);
  for (int32_t j = 0; j < n; ++j) {
    int32_t* out = some.row(j);
    if (place[j] < place[j + 1]) *out++ = place[j];  // the diagonal
    const Span p = partial(j), w = whole(j);
    std::iota(out, out + (p.last - p.first), p.first);
    some.count[j] = static_cast<int32_t>(out - some.row(j)) + p.last - p.first;
    std::iota(all.row(j), all.row(j) + (w.last - w.first), w.first);
    all.count[j] = w.last - w.first;
  }
  return {some, all};
}

Tables tree_block_mask(const at::Tensor& starts, const at::Tensor& ends, const at::Tensor& subtree_ends,
                       int64_t num_tokens, int64_t block, const std::optional<at::Tensor>& query_blocks,
                       const std::optional<at::Tensor>& scratch) {
  check(starts, ends, subtree_ends, num_tokens, block);
  const auto num_blocks = static_cast<int32_t>((num_tokens + block - 1) / block);
  std::vector<int32_t> held(num_blocks);
  std::iota(held.begin(), held.end(), 0);
  if (query_blocks.has_value()) {
    const auto given = query_blocks->to(at::kInt).contiguous();
    held.assign(given.const_data_ptr<int32_t>(), given.const_data_ptr<int32_t>() + given.numel());
    TORCH_CHECK_VALUE(std::is_sorted(held.begin(), held.end()) && (held.empty() || (held[0] >= 0 && held.back() < num_blocks)),
                      "query_blocks must be ascending block numbers below ", num_blocks);
  }
  const auto bounds = bounds_of(starts, ends, subtree_ends, num_blocks, static_cast<int32_t>(block));
  at::Tensor memory = scratch.has_value() ? *scratch : at::Tensor();
  auto [some_keys, all_keys] = key_tables(bounds, held, starts, memory);
  auto [some_queries, all_queries] = query_tables(bounds, held, starts, memory);
  return {some_keys.counts,    some_keys.indices,    all_keys.counts,    all_keys.indices,
          some_queries.counts, some_queries.indices, all_queries.counts, all_queries.indices};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gyre, m) {
  m.def(
      "tree_block_mask(Tensor starts, Tensor ends, Tensor subtree_ends, int num_tokens, int block, "
      "Tensor? query_blocks, Tensor? scratch) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(gyre, CPU, m) { m.impl("tree_block_mask", tree_block_mask); }
