import torch

from swift.training.buckets import plan_buckets


def test_buckets_hold_every_parameter_once_the_last_ones_first():
    parameters = [torch.zeros(n) for n in (10, 20, 30, 40, 500)]
    buckets = plan_buckets(parameters, bucket_bytes=280)
    assert [bucket.indices for bucket in buckets] == [(4,), (3, 2), (1, 0)]


def test_a_bucket_has_one_type():
    parameters = [torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)]
    buckets = plan_buckets(parameters, 1 << 20)
    assert sorted(bucket.indices for bucket in buckets) == [(1,), (2, 0)]
    assert all(bucket.buffer.dtype == parameters[bucket.indices[0]].dtype for bucket in buckets)


def test_views_lie_side_by_side_and_have_the_layout_of_their_parameters():
    parameters = [torch.zeros(3, 5), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    (bucket,) = plan_buckets(parameters, 1 << 20)
    for view, index in zip(bucket.views, bucket.indices, strict=True):
        assert view.shape == parameters[index].shape
        assert view.stride() == parameters[index].stride()
        view.fill_(index + 1)
    bucket.used.fill_(9)
    assert bucket.buffer.tolist() == [2.0] * 96 + [1.0] * 15 + [9.0] * 2
