"""Server-sent events; tests/proxy/test_fuzz.py cuts any stream anywhere."""

from lightning_proxy.core.sse import SSEDecoder, encode

STREAM = b': ping\n\ndata: {"a": 1}\n\nevent: x\r\ndata: two\r\ndata:  lines\r\n\r\nid: 1\rdata: cr\r\rdata: [DONE]\n\n'
DATA = [None, b'{"a": 1}', b"two\n lines", b"cr", b"[DONE]"]


def test_frames_have_the_data_of_their_lines() -> None:
    for text, data in (
        (STREAM, DATA),
        (b"data: a\r\ndata: b\r\n\r\n", [b"a\nb"]),
        (b"database: no\ndata\ndata:yes\n\n", [b"\nyes"]),
        (encode(b'{"x":"\\n"}'), [b'{"x":"\\n"}']),
    ):
        decoder = SSEDecoder()
        frames = decoder.feed(text)
        assert ([frame.data for frame in frames], decoder.rest) == (data, b"")
        assert [frame.is_done for frame in frames] == [one == b"[DONE]" for one in data]


def test_an_unfinished_frame_stays_in_rest() -> None:
    decoder = SSEDecoder()
    assert decoder.feed(b"data: [DO") == decoder.feed(b"NE]\n") == []
    assert decoder.rest == b"data: [DONE]\n"
    assert decoder.close().is_done


def test_a_frame_loses_its_data_and_no_byte_where_its_beginning_was_let_go() -> None:
    for cut in range(1, len(STREAM)):
        decoder = SSEDecoder()
        before, given, after = decoder.feed(STREAM[:cut]), decoder.let_go(), decoder.feed(STREAM[cut:])
        assert b"".join(f.raw for f in before) + given + b"".join(f.raw for f in after) + decoder.rest == STREAM
        there = [data for i, data in enumerate(DATA) if data and i != len(before)]
        assert [frame.data for frame in before + after if frame.data] == there, cut
