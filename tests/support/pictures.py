"""Pictures, looked at: words that can be read."""

from matplotlib.text import Text


def assert_no_text_meets_another(figure):
    """Nor leaves the picture."""
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for axes in figure.axes for text in (*axes.texts, axes.title, axes._left_title))]
    texts = [text for text in texts if text.get_text()]
    boxes = [Text.get_window_extent(text) for text in texts]  # without the line that leads to a name
    for number, box in enumerate(boxes):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1, texts[number]
        assert 0 <= box.y0 < box.y1 <= figure.bbox.y1, texts[number]
        assert not [other for other in boxes[:number] if box.overlaps(other)], texts[number]
