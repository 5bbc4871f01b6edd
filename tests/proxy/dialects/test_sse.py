from itertools import pairwise

from lightning_proxy.core.sse import SSEDecoder, encode

STREAM = b': ping\n\ndata: {"a": 1}\n\nevent: x\r\ndata: two\r\ndata:  lines\r\n\r\nid: 1\rdata: cr\r\rdata: [DONE]\n\n'
DATA = [None, b'{"a": 1}', b"two\n lines", b"cr", b"[DONE]"]


def frames_of(*pieces: bytes):
    decoder = SSEDecoder()
    frames = [frame for piece in pieces for frame in decoder.feed(piece)]
    return frames, decoder.rest


def test_frames_have_the_data_of_their_lines():
    frames, rest = frames_of(STREAM)
    assert [frame.data for frame in frames] == DATA
    assert [frame.is_done for frame in frames] == [False] * 4 + [True]
    assert rest == b""


def test_every_cut_gives_the_same_data_and_every_byte():
    pieces = [[STREAM[:cut], STREAM[cut:]] for cut in range(len(STREAM) + 1)]
    for size in (1, 2, 3, 7):
        cuts = [*range(0, len(STREAM), size), len(STREAM)]
        pieces.append([STREAM[a:b] for a, b in pairwise(cuts)])
    for some in pieces:
        frames, rest = frames_of(*some)
        assert [frame.data for frame in frames if frame.raw.strip()] == DATA, some
        assert b"".join(frame.raw for frame in frames) + rest == STREAM


def test_a_crlf_is_one_line_end():
    frames, rest = frames_of(b"data: a\r\n", b"data: b\r\n\r\n")
    assert [frame.data for frame in frames] == [b"a\nb"]
    assert rest == b""


def test_an_unfinished_frame_stays_in_rest():
    decoder = SSEDecoder()
    assert decoder.feed(b"data: [DO") == []
    assert decoder.feed(b"NE]\n") == []
    assert decoder.rest == b"data: [DONE]\n"
    assert decoder.close().is_done


def test_a_frame_whose_beginning_was_let_go_loses_its_data_and_no_byte():
    for cut in range(1, len(STREAM)):
        decoder = SSEDecoder()
        before, given, after = decoder.feed(STREAM[:cut]), decoder.let_go(), decoder.feed(STREAM[cut:])
        assert b"".join(f.raw for f in before) + given + b"".join(f.raw for f in after) + decoder.rest == STREAM
        there = [data for i, data in enumerate(DATA) if data and i != len(before)]
        assert [frame.data for frame in before + after if frame.data] == there, cut


def test_only_the_field_named_data_is_data():
    frames, _ = frames_of(b"database: no\ndata\ndata:yes\n\n")
    assert frames[0].data == b"\nyes"


def test_encoded_data_decodes_to_itself():
    frames, _ = frames_of(encode(b'{"x":"\\n"}'))
    assert frames[0].data == b'{"x":"\\n"}'
