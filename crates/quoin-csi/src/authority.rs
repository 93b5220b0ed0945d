//! Rewriter of the `:authority` of every request into a value that the HTTP/2 library accepts.
//!
//! Clients on the gRPC C core (Python and others) and some older ones send the path of the unix
//! socket as `:authority`. The interface does not use the field, but the library refuses a value
//! that is no host name and resets the stream before any handler sees it. So the bytes from a
//! client pass through a [`Rewriter`], which replaces the value by letters and leaves every length
//! as it was. It parses no more of HTTP/2 than it needs: the beginnings of frames, and the
//! positions of the strings of a header block (RFC 7541). No string is stored and nothing is
//! decompressed: the value that a later request refers to by index is the one that was rewritten
//! when it arrived. Bytes that do not parse pass unchanged, and the library refuses them.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

const PREFACE_BYTES: usize = 24;
const FRAME_HEADER_BYTES: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Largest header block that is rewritten; a longer one passes unchanged.
const BLOCK_BYTES_MAX: usize = 64 << 10;
const NAME: &[u8] = b":authority";
/// `NAME` in the Huffman code of RFC 7541, appendix B.
const NAME_HUFFMAN: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// Rewrites a client's bytes as they arrive.
#[derive(Default)]
struct Rewriter {
    /// Bytes that cannot pass yet: the start of a frame or of a header block.
    held: Vec<u8>,
    /// Bytes of the present frame that pass unchanged.
    passing: usize,
    /// The preface has passed.
    is_open: bool,
    /// Set once some bytes did not parse: all that follow pass unchanged.
    is_blind: bool,
}

impl Rewriter {
    /// Accepts bytes and appends those that may pass to `out`.
    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        if self.is_blind {
            out.extend_from_slice(bytes);
            return;
        }
        self.held.extend_from_slice(bytes);
        let mut at = 0;
        if !self.is_open && self.held.len() >= PREFACE_BYTES {
            self.is_open = true;
            self.passing = PREFACE_BYTES;
        }
        while self.is_open {
            let pass = self.passing.min(self.held.len() - at);
            at += pass;
            self.passing -= pass;
            if self.passing > 0 {
                break;
            }
            let Some(frame) = Frame::at(&self.held[at..]) else { break };
            if frame.kind != HEADERS {
                self.passing = FRAME_HEADER_BYTES + frame.bytes;
                continue;
            }
            match block_at(&self.held[at..]) {
                Block::Whole { fragments, bytes } => {
                    rewrite(&mut self.held[at..at + bytes], &fragments);
                    self.passing = bytes;
                }
                Block::Unfinished if self.held.len() - at < BLOCK_BYTES_MAX => break,
                Block::Unfinished | Block::Malformed => {
                    self.is_blind = true;
                    at = self.held.len();
                    break;
                }
            }
        }
        out.extend(self.held.drain(..at));
    }

    /// Appends the held bytes once a client has closed its side.
    fn finish(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.held);
    }
}

struct Frame {
    bytes: usize,
    kind: u8,
    flags: u8,
}

impl Frame {
    fn at(bytes: &[u8]) -> Option<Self> {
        let header = bytes.get(..FRAME_HEADER_BYTES)?;
        let length = [0, header[0], header[1], header[2]];
        let bytes = usize::try_from(u32::from_be_bytes(length)).ok()?;
        Some(Self { bytes, kind: header[3], flags: header[4] })
    }
}

enum Block {
    /// Positions of the pieces of the header block, and the length of all its frames.
    Whole {
        fragments: Vec<(usize, usize)>,
        bytes: usize,
    },
    Unfinished,
    Malformed,
}

/// Returns the header block that starts with the HEADERS frame at the beginning of `bytes`.
fn block_at(bytes: &[u8]) -> Block {
    let mut fragments = Vec::new();
    let mut at = 0;
    loop {
        let Some(frame) = Frame::at(&bytes[at..]) else { return Block::Unfinished };
        let payload = at + FRAME_HEADER_BYTES;
        let end = payload + frame.bytes;
        if end > bytes.len() {
            return Block::Unfinished;
        }
        let (mut start, mut stop) = (payload, end);
        match (frame.kind, fragments.is_empty()) {
            (HEADERS, true) => {
                if frame.flags & PADDED != 0 {
                    let Some(padding) = bytes[..end].get(start) else { return Block::Malformed };
                    stop = stop.saturating_sub(usize::from(*padding));
                    start += 1;
                }
                if frame.flags & PRIORITY != 0 {
                    start += 5;
                }
            }
            (CONTINUATION, false) => {}
            _ => return Block::Malformed,
        }
        if start > stop {
            return Block::Malformed;
        }
        fragments.push((start, stop));
        at = end;
        if frame.flags & END_HEADERS != 0 {
            return Block::Whole { fragments, bytes: at };
        }
    }
}

/// Rewrites the value of `:authority` in a header block that lies in pieces.
fn rewrite(bytes: &mut [u8], fragments: &[(usize, usize)]) {
    let places: Vec<usize> = fragments.iter().flat_map(|(start, end)| *start..*end).collect();
    let block: Vec<u8> = places.iter().map(|place| bytes[*place]).collect();
    for (start, end, is_huffman) in authorities(&block) {
        let value = letters(end - start, is_huffman);
        for (place, byte) in places[start..end].iter().zip(value) {
            bytes[*place] = byte;
        }
    }
}

/// Returns the positions of the values of `:authority` in a header block, and whether they are
/// compressed. Empty if the block does not parse.
fn authorities(block: &[u8]) -> Vec<(usize, usize, bool)> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < block.len() {
        let first = block[at];
        let (prefix_bits, has_strings) = match first {
            0x80.. => (7, false),
            0x40..=0x7f => (6, true),
            0x20..=0x3f => (5, false),
            _ => (4, true),
        };
        let Some((index, next)) = integer(block, at, prefix_bits) else { return Vec::new() };
        at = next;
        if !has_strings {
            continue;
        }
        // Index 1 of the static table is `:authority`; index 0 means that the name follows.
        let mut is_authority = index == 1;
        if index == 0 {
            let Some((start, end, is_huffman)) = string(block, at) else { return Vec::new() };
            let name = if is_huffman { NAME_HUFFMAN } else { NAME };
            is_authority = &block[start..end] == name;
            at = end;
        }
        let Some((start, end, is_huffman)) = string(block, at) else { return Vec::new() };
        if is_authority {
            found.push((start, end, is_huffman));
        }
        at = end;
    }
    found
}

/// Returns an integer with a prefix of `bits` bits at `at`, and the position after it.
fn integer(block: &[u8], at: usize, bits: u32) -> Option<(usize, usize)> {
    let most = (1_usize << bits) - 1;
    let mut value = usize::from(*block.get(at)?) & most;
    let mut at = at + 1;
    if value < most {
        return Some((value, at));
    }
    // Four more bytes suffice for any block within the limit.
    for shift in [0, 7, 14, 21] {
        let byte = usize::from(*block.get(at)?);
        at += 1;
        value += (byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((value, at));
        }
    }
    None
}

/// Returns the position of the string at `at`, and whether it is compressed.
fn string(block: &[u8], at: usize) -> Option<(usize, usize, bool)> {
    let is_huffman = block.get(at)? & 0x80 != 0;
    let (bytes, start) = integer(block, at, 7)?;
    let end = start.checked_add(bytes)?;
    (end <= block.len()).then_some((start, end, is_huffman))
}

/// Returns a host name of nothing but the letter a: plain, or in Huffman code (where it is 00011),
/// padded with ones as the code demands.
fn letters(bytes: usize, is_huffman: bool) -> Vec<u8> {
    if !is_huffman {
        return vec![b'a'; bytes];
    }
    let coded_bits = bytes * 8 / 5 * 5;
    let bit = |at: usize| at >= coded_bits || at % 5 >= 3;
    (0..bytes)
        .map(|byte| (0..8).fold(0, |value, at| value << 1 | u8::from(bit(byte * 8 + at))))
        .collect()
}

/// A client's connection with rewritten requests.
pub struct Connection {
    stream: UnixStream,
    rewriter: Rewriter,
    ready: Vec<u8>,
    taken: usize,
}

impl Connection {
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, rewriter: Rewriter::default(), ready: Vec::new(), taken: 0 }
    }
}

impl Connected for Connection {
    type ConnectInfo = <UnixStream as Connected>::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if this.taken < this.ready.len() {
                let bytes = buffer.remaining().min(this.ready.len() - this.taken);
                buffer.put_slice(&this.ready[this.taken..this.taken + bytes]);
                this.taken += bytes;
                return Poll::Ready(Ok(()));
            }
            this.ready.clear();
            this.taken = 0;
            let mut space = [0; 8192];
            let mut read = ReadBuf::new(&mut space);
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                this.rewriter.finish(&mut this.ready);
                if this.ready.is_empty() {
                    return Poll::Ready(Ok(()));
                }
            } else {
                this.rewriter.push(read.filled(), &mut this.ready);
            }
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, bytes)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }
    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let header = [length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
        [&header[..], payload].concat()
    }
    fn plain(name: &[u8], value: &[u8]) -> Vec<u8> {
        let length = |text: &[u8]| u8::try_from(text.len()).unwrap();
        [&[0x40, length(name)], name, &[length(value)], value].concat()
    }
    fn through(pieces: &[&[u8]]) -> Vec<u8> {
        let (mut rewriter, mut out) = (Rewriter::default(), Vec::new());
        for piece in pieces {
            rewriter.push(piece, &mut out);
        }
        rewriter.finish(&mut out);
        out
    }
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

    #[test]
    fn only_the_authority_is_replaced_by_letters() {
        let path = plain(b":path", b"/csi.v1.Identity/Probe");
        let settings = frame(4, 0, &[0, 3, 0, 0, 0, 1]);
        for (name, authority) in [
            ("literal name", plain(NAME, b"tmp%2Fcsi.sock")),
            ("static name, kept", [&[0x41, 14][..], b"tmp%2Fcsi.sock"].concat()),
            ("static name, not kept", [&[0x01, 14][..], b"tmp%2Fcsi.sock"].concat()),
        ] {
            let block = [&path[..], &authority, &[0x83, 0x3f, 0x01]].concat();
            let request = [PREFACE, &settings, &frame(HEADERS, END_HEADERS, &block)].concat();
            let out = through(&[&request]);
            assert_eq!(out.len(), request.len(), "{name}");
            let changed: Vec<_> =
                (0..out.len()).filter(|at| out[*at] != request[*at]).map(|at| out[at]).collect();
            assert_eq!(changed, [b'a'; 14], "{name}");
        }
    }

    #[test]
    fn padded_prioritized_and_continued_header_blocks_are_parsed() {
        let block = [plain(b":path", b"/x"), plain(NAME, b"tmp%2Fcsi.sock")].concat();
        let padded = [&[3, 0, 0, 0, 0, 16][..], &block, &[0; 3]].concat();
        let one = frame(HEADERS, END_HEADERS | PADDED | PRIORITY, &padded);
        let (left, right) = block.split_at(25);
        let two = [frame(HEADERS, 0, left), frame(CONTINUATION, END_HEADERS, right)].concat();
        for request in [[PREFACE, &one].concat(), [PREFACE, &two].concat()] {
            let whole = through(&[&request]);
            assert_eq!(whole.len(), request.len());
            assert!(!whole.windows(3).any(|three| three == b"%2F"));
            let bytes: Vec<_> = request.chunks(1).collect();
            assert_eq!(through(&bytes), whole, "the split of the bytes has no effect");
        }
    }

    #[test]
    fn letters_in_huffman_code_fill_any_length_with_valid_padding() {
        assert_eq!(letters(5, true), [0x18, 0xc6, 0x31, 0x8c, 0x63]);
        // One letter and three bits of padding.
        assert_eq!(letters(1, true), [0b0001_1111]);
        assert!(letters(0, true).is_empty());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_change_the_length(
            bytes in proptest::collection::vec(any::<u8>(), 0..600), cut in 0_usize..600,
        ) {
            let stream = [PREFACE, &bytes].concat();
            let cut = cut.min(stream.len());
            let out = through(&[&stream[..cut], &stream[cut..]]);
            prop_assert_eq!(out.len(), stream.len());
        }

        #[test]
        fn no_header_block_makes_it_panic(block in proptest::collection::vec(any::<u8>(), 0..300)) {
            let request = [PREFACE, &frame(HEADERS, END_HEADERS, &block)].concat();
            prop_assert_eq!(through(&[&request]).len(), request.len());
        }
    }
}
