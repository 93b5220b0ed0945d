//! Two ends of a connection.

use quoin_types::ids::{Epoch, Incarnation, SessionKey};
use quoin_wire::{Connection, Frame, ReadOutcome};

pub fn session() -> SessionKey {
    SessionKey { epoch: Epoch(3), incarnation: Incarnation(1 << 99), nonce: 5 }
}

pub fn through(from: &mut Connection, to: &mut Connection) -> Vec<Frame> {
    let mut frames = Vec::new();
    loop {
        let all_out = from.flush().unwrap();
        assert_ne!(to.receive().unwrap(), ReadOutcome::End);
        while let Some(incoming) = to.next_frame().unwrap() {
            assert_eq!(incoming.session, session());
            frames.push(incoming.frame);
        }
        if all_out && to.buffered_bytes() == 0 {
            return frames;
        }
    }
}
