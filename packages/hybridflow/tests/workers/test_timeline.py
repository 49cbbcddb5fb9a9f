from hybridflow.workers import timeline
from hybridflow.workers.timeline import Span, draw
from shared.training.pictures import save_picture


def test_names_of_many_methods_stay_inside_the_picture(tmp_path, monkeypatch):
    drawn = []

    def save(figure, path, title):
        save_picture(figure, path, title)
        drawn.append(figure)

    monkeypatch.setattr(timeline, "save_picture", save)
    names = [f"rollout.stage_weights{i}" for i in range(8)]
    spans = [
        Span(call=i, name=name, rank=i % 2, start_s=float(i), stop_s=i + 1.0)
        for i, name in enumerate(names)
    ]
    draw(spans, tmp_path / "timeline.svg", "eight methods on two ranks")
    (figure,) = drawn
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
