//! Connections that a pool ends by itself, whatever their peers do.

use quoin_wire::ConnectionKind;

use super::*;

const BLOCKS: u32 = 256;

fn started() -> (Process, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start(&new_disk(), &dir.path().join(WITNESS_FILE));
    process.create_replica();
    (process, dir)
}

/// A bulk connection of this session that has said nothing yet.
fn bulk_of(process: &Process, session: &Session) -> Session {
    let hello = Hello::new(VOLUME, MEMBER.id, MEMBER.guid, Bytes::new());
    let hello = Hello { kind: ConnectionKind::Bulk, ..hello };
    let (security, key) = (ClientSecurity::PlainLoopback, session.key);
    let connection =
        quoin_wire::establish::dial("p", process.address, &security, key, &hello).unwrap();
    Session { connection, key }
}

/// Until when its end of the connection is closed.
fn lives_for(session: &mut Session) -> Duration {
    let began = Instant::now();
    assert_eq!(session.next(), None, "nothing was asked");
    began.elapsed()
}

#[test]
fn a_bulk_connection_ends_with_its_session_though_it_never_said_that_it_is_one() {
    let (process, _dir) = started();
    let (session, _) = process.session(1).unwrap();
    let mut bulk = bulk_of(&process, &session);
    drop(session);
    assert!(lives_for(&mut bulk) < Duration::from_secs(5));
    process.stop();
}

#[test]
fn a_bulk_connection_that_does_not_say_which_it_is_ends_and_one_that_did_stays() {
    let (process, _dir) = started();
    let (mut session, ack) = process.session(1).unwrap();
    let mut opened = bulk_of(&process, &session);
    opened.send(&ToReplica::OpenBulk { number: 1 });
    let mut silent = bulk_of(&process, &session);
    let lived = lives_for(&mut silent);
    assert!(lived > Duration::from_secs(5), "it is given a moment, not {lived:?}");
    session.feed(&ack);
    opened.send(&ToReplica::IncrementBegin { rebuild: 1, from: Lsn(0) });
    assert!(matches!(opened.next(), Some(FromReplica::IncrementBegun { .. })));
    process.stop();
}

/// The answers that a peer does not take are megabytes, and there may be thousands of such peers.
#[test]
fn a_session_that_was_ended_is_gone_though_its_peer_takes_no_answers() {
    let (process, _dir) = started();
    let (mut session, ack) = process.session(1).unwrap();
    session.feed(&ack);
    let position = Position { epoch: session.key.epoch, lsn: ack.position.lsn.next() };
    let data = Bytes::from(vec![7; BLOCKS as usize * 4096]);
    let entry = Entry::after(ack.chain, position, EntryKind::Write, 0, BLOCKS, data, false);
    let (entries, stable) = (vec![Arc::new(entry)], ack.stable);
    session.send(&ToReplica::Append { entries, stable, sync: false, ping: Ping(5) });
    for id in 0..12 {
        session.send(&ToReplica::Read {
            id,
            view: ReadView::Live,
            lba: 0,
            blocks: BLOCKS,
            after: position.lsn,
            want_data: true,
            ping: Ping(6),
        });
    }
    assert_eq!(process.metrics.sessions.get(), 1);
    // It ends its own session by what it sends then.
    session.send(&ToReplica::Truncate { keep: Lsn(9), tip: Lsn(9) });
    let began = Instant::now();
    eventually("the session is gone", || (process.metrics.sessions.get() == 0).then_some(()));
    let took = began.elapsed();
    assert!(took > Duration::from_secs(5), "its answers do not fit the socket: {took:?}");
    process.stop();
}
