//! Limits of requests to the daemon, each at one below, at it, and at one above. These tests need root, FUSE and
//! loop devices, and report it if they are missing.

use std::path::Path;

use crate::daemon::{Daemon, SIZE, asked, have_requirements};
use quoin_attach::Error;
use quoin_attach::protocol::{AttachVolume, Kind, LINE_BYTES_MAX};
use quoin_testkit::nbd_server::{Server, ServerOptions, volume};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Returns whether a request was refused as one that can never succeed.
fn is_invalid<T: std::fmt::Debug>(outcome: &Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::Refused { kind: Kind::Invalid, .. }))
}

#[tokio::test(flavor = "multi_thread")]
async fn each_limit_of_a_request_is_taken_at_its_edge_and_refused_beyond_it() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let _server = Server::start(&socket, volume(SIZE as usize), ServerOptions::default());
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let client = &daemon.client;
    let good = asked("17", &socket);
    let named = |bytes: usize| AttachVolume { volume: "x".repeat(bytes), ..good.clone() };
    let sized = |size| AttachVolume { size, ..good.clone() };
    let blocks = |block_size, size| AttachVolume { block_size, size, ..good.clone() };
    let at = |path: &Path| AttachVolume { nbd_socket: path.to_owned(), ..good.clone() };
    for (what, request, is_taken) in [
        ("no name", named(0), false),
        ("a name of one byte", named(1), true),
        ("a name of 127 bytes", named(127), true),
        ("a name of 128 bytes", named(128), true),
        ("a name of 129 bytes", named(129), false),
        ("no size", sized(0), false),
        ("one byte less than a block", sized(4095), false),
        ("one block", sized(4096), true),
        ("one byte more than a block", sized(4097), false),
        ("one block less than the target has", sized(SIZE - 4096), true),
        ("all that the target has", sized(SIZE), true),
        ("the largest size of all", sized(i64::MAX as u64), false),
        ("one more than that", sized(1 << 63), false),
        ("blocks of 511 bytes", blocks(511, 511 * 8), false),
        ("blocks below those of the target", blocks(512, 512), false),
        ("blocks of 513 bytes", blocks(513, 513 * 8), false),
        ("blocks of 4095 bytes", blocks(4095, 4095), false),
        ("blocks of 4097 bytes", blocks(4097, 4097), false),
        ("a relative socket", at(Path::new("nbd.sock")), false),
    ] {
        let volume = request.volume.clone();
        let outcome = client.attach(request).await;
        match is_taken {
            true => {
                outcome.unwrap_or_else(|error| panic!("{what}: {error}"));
                client.detach(&volume).await.unwrap();
            }
            false => assert!(is_invalid(&outcome), "{what}: {outcome:?}"),
        }
    }
    // A size that is possible and that the target does not have yet may come.
    let larger = client.attach(sized(SIZE + 4096)).await;
    let is_awaited = matches!(larger, Err(Error::Refused { kind: Kind::Unavailable, .. }));
    assert!(is_awaited, "{larger:?}");
    assert!(client.list().await.unwrap().is_empty());

    client.attach(good.clone()).await.unwrap();
    for (bytes, is_taken) in [(0, false), (1, true), (127, true), (128, true), (129, false)] {
        let linked = client.link("17", &"y".repeat(bytes)).await;
        assert_eq!(is_invalid(&linked), !is_taken, "a link's name of {bytes} bytes: {linked:?}");
        if let Ok(linked) = linked {
            let name = linked.link.unwrap();
            assert_eq!(name.file_name().unwrap().len(), bytes);
        }
    }
    for (size, is_taken) in [(SIZE - 4096, false), (SIZE - 1, false), (SIZE, true)] {
        let resized = client.resize("17", size).await;
        assert_eq!(is_invalid(&resized), !is_taken, "resized to {size}: {resized:?}");
    }
    client.detach("17").await.unwrap();

    // A line of a connection, with its end; the connection of one that is too long is closed.
    let limit = LINE_BYTES_MAX as usize;
    for (bytes, is_kept) in [(limit - 1, true), (limit, true), (limit + 1, false)] {
        let mut stream = UnixStream::connect(daemon.directory.join("attach.sock")).await.unwrap();
        let mut line = b"{\"list\":{}}".to_vec();
        line.resize(bytes - 1, b' ');
        line.push(b'\n');
        for _ in 0..2 {
            // The second one fails where the connection is closed.
            let _ = stream.write_all(&line).await;
        }
        stream.shutdown().await.ok();
        let mut answers = Vec::new();
        let _ = stream.read_to_end(&mut answers).await;
        let answered = answers.iter().filter(|byte| **byte == b'\n').count();
        assert_eq!(answered == 2, is_kept, "a line of {bytes} bytes has {answered} answers");
    }
    daemon.stop().await.unwrap();
}
