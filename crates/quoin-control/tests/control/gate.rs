//! Callers are let through or refused by path and role, before their bodies are read.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use quoin_identity::{Role, newcomer_channel, unix_channel};
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::server::Server;

/// A body of pieces; it counts those that were read, and then ends or continues without end.
struct Pieces {
    left: Vec<Bytes>,
    ends: bool,
    taken: Arc<AtomicUsize>,
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match self.left.pop() {
            Some(piece) => {
                self.taken.fetch_add(1, Ordering::Relaxed);
                Poll::Ready(Some(Ok(Frame::data(piece))))
            }
            None if self.ends => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

/// Returns the code of an answer before the call's body ends; `None`: it waits for the body.
async fn answer(mut channel: Channel, path: &str, body: Pieces) -> Option<(Code, String)> {
    let request = http::Request::post(format!("http://quoin/quoin.control.v1.{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(body))
        .unwrap();
    std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
    let calling = tokio::time::timeout(Duration::from_secs(2), channel.call(request));
    let answer = calling.await.ok()?.unwrap();
    let status = Status::from_header_map(answer.headers()).expect("a refusal has no body");
    Some((status.code(), status.message().to_owned()))
}

fn endless() -> Pieces {
    Pieces { left: Vec::new(), ends: false, taken: Arc::default() }
}

/// Returns a framed message, in pieces, the last one first.
fn framed(message: &[u8]) -> Vec<Bytes> {
    let mut whole = vec![0];
    whole.extend((message.len() as u32).to_be_bytes());
    whole.extend(message);
    whole.chunks(64 << 10).rev().map(Bytes::copy_from_slice).collect()
}

/// Returns the calls in the protocol's own description.
fn calls() -> Vec<String> {
    let proto = include_str!("../../../quoin-api/proto/control.proto");
    let (mut service, mut calls) = ("", Vec::new());
    for line in proto.lines() {
        let mut words = line.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
        match (words.next(), words.next()) {
            (Some("service"), Some(name)) => service = name,
            (Some("rpc"), Some(name)) => calls.push(format!("{service}/{name}")),
            _ => {}
        }
    }
    calls
}

#[tokio::test]
async fn every_call_is_open_to_the_roles_of_the_table_and_closed_to_others_before_any_of_its_body()
{
    const GOVERNED: [&str; 18] = [
        "RecoverVolume",
        "RemovePool",
        "RemoveNode",
        "ListAdmins",
        "RemoveAdmin",
        "SetNode",
        "CreateJoinToken",
        "ListJoinTokens",
        "RevokeJoinToken",
        "RotateAuthority",
        "InvitePeer",
        "PairPeer",
        "ListPeers",
        "ModifyPeer",
        "UnpairPeer",
        "RemoveMirror",
        "Backup",
        "RecoverRecords",
    ];
    let server = Server::start().await;
    let token = server.token("", "", 60).await;
    let newcomer = newcomer_channel(&server.address, &token).await.unwrap();
    let mut callers = vec![
        ("newcomer", newcomer),
        ("local", unix_channel(&server.home("controller/admin.sock"))),
    ];
    for role in [Role::Pool, Role::Node, Role::Admin, Role::Mirror] {
        let identity = server.member(role, "m1").await;
        callers.push((role.as_str(), identity.channel(&server.address).unwrap()));
    }
    let open = |call: &str, caller: &str| match call.split_once('/').unwrap() {
        ("Join", "Introduce" | "Join" | "Pair") => caller == "newcomer",
        ("Join", "Renew") => ["pool", "node", "admin", "mirror"].contains(&caller),
        ("Agent", name) if name.ends_with("Pool") || name == "ReportHoldings" => {
            ["local", "pool"].contains(&caller)
        }
        ("Agent", name) if name.ends_with("Mirror") => ["local", "mirror"].contains(&caller),
        ("Agent", _) => ["local", "node"].contains(&caller),
        ("Cluster", name) if GOVERNED.contains(&name) => ["local", "admin"].contains(&caller),
        ("Cluster", _) => ["local", "admin", "node"].contains(&caller),
        other => panic!("{other:?} is in no row"),
    };
    let calls = calls();
    let mut asked = Vec::new();
    assert!(calls.len() > 40);
    for (caller, channel) in &callers {
        for call in &calls {
            // A connection without a certificate has two calls at a time, and those that are open to it do not end.
            let channel = match (*caller, call.starts_with("Join/")) {
                ("newcomer", true) => newcomer_channel(&server.address, &token).await.unwrap(),
                _ => channel.clone(),
            };
            asked.push(async move {
                let answered = answer(channel, call, endless()).await;
                (*caller, call.clone(), answered)
            });
        }
    }
    for (caller, call, answered) in futures::future::join_all(asked).await {
        let code = answered.as_ref().map(|(code, _)| *code);
        let expected = match (open(&call, caller), caller) {
            (true, _) => None,
            (false, "newcomer") => Some(Code::Unauthenticated),
            (false, _) => Some(Code::PermissionDenied),
        };
        assert_eq!(code, expected, "{caller} calls {call}: {answered:?}");
    }
    for (caller, channel) in &callers {
        let (code, _) = answer(channel.clone(), "Agent/Nothing", endless()).await.unwrap();
        let nobody = *caller == "newcomer";
        assert_eq!(code, if nobody { Code::Unauthenticated } else { Code::Unimplemented });
    }
    server.stop().await;
}

fn peak_memory_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

#[tokio::test]
async fn sixteen_mebibytes_of_a_stranger_are_neither_read_nor_decoded() {
    let server = Server::start().await;
    let token = server.token("", "", 60).await;
    let newcomer = newcomer_channel(&server.address, &token).await.unwrap();
    // Empty replicas: two bytes each on the wire, 152 in memory.
    let message = [0x4a, 0x00].repeat((8 << 20) - 8);
    let before = peak_memory_bytes();
    let taken = Arc::new(AtomicUsize::new(0));
    let body = Pieces { left: framed(&message), ends: true, taken: taken.clone() };
    let (code, _) = answer(newcomer, "Agent/ReportPool", body).await.unwrap();
    assert_eq!(code, Code::Unauthenticated);
    let sent = taken.load(Ordering::Relaxed) * (64 << 10);
    assert!(sent < 4 << 20, "{sent} bytes were taken, more than a connection's window");
    let grown = peak_memory_bytes() - before;
    assert!(grown < 200 << 20, "{grown} bytes more were used");
    server.stop().await;
}

#[tokio::test]
async fn a_members_message_of_very_many_elements_is_refused_before_it_is_decoded() {
    let server = Server::start().await;
    let pool = server.member(Role::Pool, "p1").await.channel(&server.address).unwrap();
    let send = |call: &'static str, message: Vec<u8>| {
        let (channel, taken) = (pool.clone(), Arc::default());
        let body = Pieces { left: framed(&message), ends: true, taken };
        async move { answer(channel, call, body).await.unwrap().0 }
    };
    let before = peak_memory_bytes();
    let replicas = [0x4a, 0x00].repeat((2 << 20) - 8);
    assert_eq!(send("Agent/ReportPool", replicas).await, Code::ResourceExhausted);
    let too_large = [0x4a, 0x00].repeat((2 << 20) + 8);
    assert_eq!(send("Agent/ReportPool", too_large).await, Code::OutOfRange);
    let holdings = [0x22, 0x00].repeat((8 << 20) - 8);
    assert_eq!(send("Agent/ReportHoldings", holdings).await, Code::ResourceExhausted);
    let grown = peak_memory_bytes() - before;
    assert!(grown < 200 << 20, "{grown} bytes more were used");
    server.stop().await;
}

#[tokio::test]
async fn a_member_holds_its_share_of_the_streams_and_leaves_the_rest_to_others() {
    use quoin_api::control::WatchNodeRequest;
    use quoin_api::control::agent_client::AgentClient;
    let server = Server::start().await;
    let greedy = server.member(Role::Node, "n1").await.channel(&server.address).unwrap();
    let other = server.member(Role::Node, "n2").await.channel(&server.address).unwrap();
    let watch = |channel: &Channel, node: &str| {
        let mut agent = AgentClient::new(channel.clone());
        let request = WatchNodeRequest { node: node.into() };
        async move { agent.watch_node(request).await.map(tonic::Response::into_inner) }
    };
    let mut held = Vec::new();
    let refusal = loop {
        match watch(&greedy, "n1").await {
            Ok(stream) => held.push(stream),
            Err(status) => break status,
        }
        assert!(held.len() < 250, "one member has all the streams of a connection");
    };
    assert_eq!(refusal.code(), Code::ResourceExhausted, "{refusal}");
    watch(&other, "n2").await.unwrap();
    held.clear();
    // The places are free again once the controller has noticed it.
    for _ in 0..200 {
        if watch(&greedy, "n1").await.is_ok() {
            return server.stop().await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the places of streams that ended stay taken");
}
