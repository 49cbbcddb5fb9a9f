import torch

from swift.training.buckets import Sample, plan_buckets


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


def sample_of(*values, step=3, place=(0, 2)):
    """A sample whose buckets have these values."""
    sample = Sample(step, place)
    for bucket, value in enumerate(values):
        sample.take(bucket, torch.tensor([1.0, value]))
    return sample


def test_a_repeated_step_is_compared_by_what_was_seen_of_the_torn_one():
    nan = float("nan")
    repeated = sample_of(2.0, nan, 4.0)
    repeated.take(0, torch.zeros(2))  # a later sum of the same step is another
    for torn in (sample_of(), sample_of(2.0, nan), sample_of(2.0, nan, 4.0, 5.0)):
        assert repeated.describe_difference(torn) is None
    assert "step 3 was repeated" in str(repeated.describe_difference(sample_of(2.0, nan, 7.0)))
    assert "by up to 3:" in str(sample_of(2.0, 4.0).describe_difference(sample_of(2.0, 7.0)))
    assert sample_of(2.0).describe_difference(sample_of(9.0, step=2)) is None
    # Another rank reads other data, and so does one of another number of ranks.
    for place in ((1, 2), (0, 3)):
        assert sample_of(2.0).describe_difference(sample_of(9.0, place=place)) is None
