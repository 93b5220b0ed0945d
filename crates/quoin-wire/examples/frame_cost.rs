//! Cost of an `Append` of 4 KiB and of 128 KiB in each protection mode, without sockets:
//! `cargo run --release -p quoin-wire --example frame_cost`.

use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use quoin_types::entry::{Chain, Entry, EntryKind};
use quoin_types::ids::{Epoch, Lsn, Position, SessionKey};
use quoin_types::message::{Ping, ToReplica};
use quoin_wire::decode::decode;
use quoin_wire::encode::{FrameBuffer, to_replica};
use quoin_wire::frame::{HEADER_LEN, Header, Limits};
use quoin_wire::queue::SendQueue;
use quoin_wire::security::{Mode, Opener, SECRET_LEN, Sealer};

fn main() {
    for blocks in [1, 32] {
        measure(blocks, 200_000 / blocks);
    }
}

fn measure(blocks: u32, rounds: u32) {
    let at = Position { epoch: Epoch(1), lsn: Lsn(1) };
    let data = Bytes::from(vec![7u8; 4096 * blocks as usize]);
    let entry = Arc::new(Entry::after(Chain(0), at, EntryKind::Write, 8, blocks, data, false));
    let message =
        ToReplica::Append { entries: vec![entry], stable: Lsn(0), sync: false, ping: Ping(1) };
    for mode in [Mode::Plain, Mode::Authenticate, Mode::Encrypt] {
        let mut sealer = Sealer::new(mode, [1; SECRET_LEN]);
        let mut opener = Opener::new(mode, [1; SECRET_LEN]);
        let mut frame = FrameBuffer::default();
        let (mut sending, mut receiving) = (0, 0);
        for _ in 0..rounds {
            let mut queue = SendQueue::default();
            let start = Instant::now();
            to_replica(SessionKey::default(), &message, &mut frame, |frame| {
                sealer.seal(frame, &mut queue);
            })
            .expect("a valid message");
            sending += start.elapsed().as_nanos();
            let bytes = BytesMut::from(queue.into_bytes());
            let start = Instant::now();
            let head = bytes.first_chunk::<HEADER_LEN>().expect("a header");
            let header = Header::decode(head, &Limits::SESSION).expect("a valid header");
            let opened = opener.open(bytes).expect("a valid frame");
            std::hint::black_box(decode(&header, opened).expect("a valid message"));
            receiving += start.elapsed().as_nanos();
        }
        let per = |total: u128| total / u128::from(rounds);
        println!(
            "{} KiB, {mode:?}: send {} ns, receive {} ns",
            4 * blocks,
            per(sending),
            per(receiving)
        );
    }
}
