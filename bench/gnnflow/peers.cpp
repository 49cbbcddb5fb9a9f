// Ways of finding a node's newest neighbours in a static, time-sorted adjacency that ours is measured
// against: a bisection; TGL's pointers, which only move forward, so that of two roots of one node
// the earlier one loses neighbours; and such pointers with a walk back, which is exact, and quick while
// roots come in order of time. Written after the description of TGL's sampler; all fill the columns
// that ours fills.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// Writes the newest `fanout` of edges [first, end) of a root, newest first.
inline int64_t emit(const int32_t* neighbors, const int64_t* times, const int32_t* eids,
                    int64_t first, int64_t end, int64_t root, int64_t root_time, int64_t fanout,
                    int64_t* nodes_out, int64_t* times_out, int64_t* dt_out, int64_t* eids_out,
                    int64_t* row_out, int64_t at) {
  const int64_t low = std::max(first, end - fanout);
  for (int64_t place = end - 1; place >= low; --place, ++at) {
    nodes_out[at] = neighbors[place];
    times_out[at] = times[place];
    dt_out[at] = root_time - times[place];
    eids_out[at] = eids[place];
    row_out[at] = root;
  }
  return at;
}

}  // namespace

extern "C" {

int64_t exact_recent(const int64_t* indptr, const int32_t* neighbors, const int64_t* times,
                     const int32_t* eids, const int64_t* roots, const int64_t* root_times,
                     int64_t num_roots, int64_t fanout, int64_t* nodes_out, int64_t* times_out,
                     int64_t* dt_out, int64_t* eids_out, int64_t* row_out) {
  int64_t at = 0;
  for (int64_t root = 0; root < num_roots; ++root) {
    const int64_t first = indptr[roots[root]];
    const int64_t last = indptr[roots[root] + 1];
    const int64_t end = std::lower_bound(times + first, times + last, root_times[root]) - times;
    at = emit(neighbors, times, eids, first, end, root, root_times[root], fanout, nodes_out,
              times_out, dt_out, eids_out, row_out, at);
  }
  return at;
}

// `pointers` holds, for each node, where its last query ended.
static void move_on(const int64_t* indptr, const int64_t* times, const int64_t* roots,
                    const int64_t* root_times, int64_t num_roots, int64_t* pointers) {
  for (int64_t root = 0; root < num_roots; ++root) {
    const int64_t node = roots[root];
    int64_t end = pointers[node];
    while (end < indptr[node + 1] && times[end] < root_times[root]) ++end;
    pointers[node] = end;
  }
}

// Of the newest `fanout` before the pointer those earlier than the root: too few where it moved on.
int64_t tgl_recent(const int64_t* indptr, const int32_t* neighbors, const int64_t* times,
                   const int32_t* eids, const int64_t* roots, const int64_t* root_times,
                   int64_t num_roots, int64_t fanout, int64_t* pointers, int64_t* nodes_out,
                   int64_t* times_out, int64_t* dt_out, int64_t* eids_out, int64_t* row_out) {
  move_on(indptr, times, roots, root_times, num_roots, pointers);
  int64_t at = 0;
  for (int64_t root = 0; root < num_roots; ++root) {
    const int64_t node = roots[root];
    const int64_t first = std::max(indptr[node], pointers[node] - fanout);
    int64_t end = pointers[node];
    while (end > first && times[end - 1] >= root_times[root]) --end;
    at = emit(neighbors, times, eids, first, end, root, root_times[root], fanout, nodes_out,
              times_out, dt_out, eids_out, row_out, at);
  }
  return at;
}

int64_t walking_recent(const int64_t* indptr, const int32_t* neighbors, const int64_t* times,
                       const int32_t* eids, const int64_t* roots, const int64_t* root_times,
                       int64_t num_roots, int64_t fanout, int64_t* pointers, int64_t* nodes_out,
                       int64_t* times_out, int64_t* dt_out, int64_t* eids_out, int64_t* row_out) {
  move_on(indptr, times, roots, root_times, num_roots, pointers);
  int64_t at = 0;
  for (int64_t root = 0; root < num_roots; ++root) {
    const int64_t node = roots[root];
    int64_t end = pointers[node];
    while (end > indptr[node] && times[end - 1] >= root_times[root]) --end;
    at = emit(neighbors, times, eids, indptr[node], end, root, root_times[root], fanout, nodes_out,
              times_out, dt_out, eids_out, row_out, at);
  }
  return at;
}
}
