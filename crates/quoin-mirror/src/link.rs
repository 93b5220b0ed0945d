//! One connection to a mirror of a peer: both sides introduce themselves, ping each other, and carry the
//! messages of their controllers.

use std::time::Duration;

use quoin_api::control::PeerIntroduction;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::frame::Frame;
use crate::messages::LinkPlace;

const PING_EVERY: Duration = Duration::from_secs(1);
/// A side that says nothing for so long, or takes nothing, is gone.
const SILENT_MAX: Duration = Duration::from_secs(10);

/// A link is made anew then, by the certificates and authorities of that time.
const LINK_MAX: Duration = Duration::from_secs(3600);

/// Exchanges frames until the connection ends or is not trusted any more. Returns why it ended.
pub async fn exchange<S: AsyncRead + AsyncWrite>(
    stream: S,
    own: watch::Receiver<PeerIntroduction>,
    place: LinkPlace<'_>,
    is_trusted: impl Fn() -> bool,
    mut take: impl FnMut(Frame),
) -> String {
    let (reader, writer) = tokio::io::split(stream);
    let hear = |frame| {
        place.heard();
        take(frame);
    };
    tokio::select! {
        why = read(reader, hear) => why,
        why = write(writer, own, &place, is_trusted) => why,
        () = tokio::time::sleep(LINK_MAX) => "it is made anew".to_owned(),
    }
}

async fn read(mut reader: impl AsyncRead + Unpin, mut take: impl FnMut(Frame)) -> String {
    loop {
        match timeout(SILENT_MAX, Frame::read(&mut reader)).await {
            Ok(Ok(frame)) => take(frame),
            Ok(Err(error)) => return format!("the link ended: {error}"),
            Err(_) => return format!("the link was silent for {} s", SILENT_MAX.as_secs()),
        }
    }
}

async fn write(
    mut writer: impl AsyncWrite + Unpin,
    mut own: watch::Receiver<PeerIntroduction>,
    place: &LinkPlace<'_>,
    is_trusted: impl Fn() -> bool,
) -> String {
    let mut news = place.news();
    let mut frame = Frame::Hello(own.borrow_and_update().clone());
    loop {
        if !is_trusted() {
            return "the peer's mirror is not trusted any more".to_owned();
        }
        let sent = async {
            let bytes = frame.encode().map_err(|error| error.to_string())?;
            writer.write_all(&bytes).await.map_err(|error| error.to_string())?;
            writer.flush().await.map_err(|error| error.to_string())
        };
        match timeout(SILENT_MAX, sent).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return format!("the link ended: {error}"),
            Err(_) => return format!("the link took nothing for {} s", SILENT_MAX.as_secs()),
        }
        let mut ping = std::pin::pin!(tokio::time::sleep(PING_EVERY));
        frame = loop {
            match own.has_changed() {
                Ok(true) => break Frame::Hello(own.borrow_and_update().clone()),
                Ok(false) => {}
                Err(_) => return "this mirror ends".to_owned(),
            }
            if let Some(message) = place.next() {
                break message;
            }
            tokio::select! {
                () = &mut ping => break Frame::Ping,
                // Both are looked at above; the place outlasts its news.
                _ = own.changed() => own.mark_changed(),
                _ = news.changed() => {}
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use bytes::Bytes;
    use quoin_identity::ClusterId;

    use super::*;
    use crate::messages::Outbox;

    fn said(address: &str) -> PeerIntroduction {
        PeerIntroduction { addresses: vec![address.into()], ..Default::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn each_side_hears_the_other_and_what_changes_is_said_again() {
        let (one, other) = tokio::io::duplex(1 << 20);
        let (changes, own) = watch::channel(said("a:1"));
        let (_still, theirs) = watch::channel(said("b:1"));
        let heard = Arc::new(Mutex::new(Vec::new()));
        let keep = heard.clone();
        let there = tokio::spawn(async move {
            let outbox = Outbox::default();
            let place = outbox.link(ClusterId(1), false);
            exchange(other, theirs, place, || true, move |f| keep.lock().unwrap().push(f)).await
        });
        let is_trusted = Arc::new(AtomicBool::new(true));
        let trusted = is_trusted.clone();
        let here = tokio::spawn(async move {
            let outbox = Outbox::default();
            let place = outbox.link(ClusterId(2), true);
            exchange(one, own, place, move || trusted.load(Ordering::Relaxed), |_| {}).await
        });
        tokio::time::sleep(Duration::from_millis(1500)).await;
        changes.send_replace(said("c:1"));
        tokio::time::sleep(Duration::from_millis(100)).await;
        let expected = [Frame::Hello(said("a:1")), Frame::Ping, Frame::Hello(said("c:1"))];
        assert_eq!(*heard.lock().unwrap(), expected);
        is_trusted.store(false, Ordering::Relaxed);
        assert_eq!(here.await.unwrap(), "the peer's mirror is not trusted any more");
        assert!(there.await.unwrap().starts_with("the link ended"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_side_that_says_nothing_is_left() {
        let (one, _other) = tokio::io::duplex(1 << 20);
        let (_still, own) = watch::channel(said("a:1"));
        let outbox = Outbox::default();
        let place = outbox.link(ClusterId(2), true);
        let ended = exchange(one, own, place, || true, |_| {}).await;
        assert_eq!(ended, "the link was silent for 10 s");
    }

    #[tokio::test(start_paused = true)]
    async fn messages_pass_a_link_both_ways_at_once() {
        let (one, other) = tokio::io::duplex(1 << 20);
        let (_still, own) = watch::channel(said("a:1"));
        let boxes = [Outbox::default(), Outbox::default()];
        let (heard, listen) = tokio::sync::mpsc::unbounded_channel();
        let mut listen = listen;
        let end = |stream, side: usize| {
            let (place, heard) = (boxes[side].link(ClusterId(7), side == 0), heard.clone());
            exchange(
                stream,
                own.clone(),
                place,
                || true,
                move |frame| {
                    if let Frame::Group { group, body } = frame {
                        heard.send((side, group, body)).unwrap();
                    }
                },
            )
        };
        let told = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let before = tokio::time::Instant::now();
            boxes[0].push(ClusterId(7), 3, Bytes::from_static(b"there"));
            assert_eq!(listen.recv().await.unwrap(), (1, 3, Bytes::from_static(b"there")));
            boxes[1].push(ClusterId(7), 4, Bytes::from_static(b"back"));
            assert_eq!(listen.recv().await.unwrap(), (0, 4, Bytes::from_static(b"back")));
            assert!(before.elapsed() < Duration::from_millis(10), "no interval is waited for");
        };
        tokio::select! {
            why = end(one, 0) => panic!("{why}"),
            why = end(other, 1) => panic!("{why}"),
            () = told => {}
        }
    }
}
