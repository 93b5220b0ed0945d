//! Callers that begin messages and never end them.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::Frame;
use quoin_api::control::NodeReport;
use quoin_api::control::agent_client::AgentClient;
use quoin_identity::{Role, newcomer_channel};
use tonic::Code;
use tonic::body::Body;
use tonic::codegen::http::Request;
use tonic::transport::Channel;
use tower::Service;

use crate::server::Server;

/// A message without its last byte.
struct Half(Option<Bytes>);

impl http_body::Body for Half {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        match self.0.take() {
            Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            None => Poll::Pending,
        }
    }
}

/// A message of so many bytes that is one unknown field, without its last byte.
fn half(message_bytes: u32) -> Bytes {
    let mut bytes = vec![0];
    bytes.extend(message_bytes.to_be_bytes());
    let at = bytes.len();
    bytes.resize(at + message_bytes as usize - 1, 0);
    // Field 1000 with a length of four bytes.
    let mut field = vec![0xc2, 0x3e];
    let left = message_bytes - 6;
    field.extend([0, 7, 14, 21].map(|bits| {
        let more = if bits < 21 { 0x80 } else { 0 };
        (left >> bits & 0x7f) as u8 | more
    }));
    bytes[at..at + 6].copy_from_slice(&field);
    bytes.into()
}

/// Begins a call and returns the code of its refusal.
async fn begin(mut channel: Channel, path: &'static str, message: Bytes) -> Code {
    let request = Request::post(format!("/quoin.control.v1.{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(Half(Some(message))))
        .unwrap();
    let ready = std::future::poll_fn(|cx| channel.poll_ready(cx)).await;
    if ready.is_err() {
        return Code::Unavailable;
    }
    match channel.call(request).await {
        Ok(answer) => answer
            .headers()
            .get("grpc-status")
            .map_or(Code::Ok, |status| Code::from_bytes(status.as_bytes())),
        Err(_) => Code::Unavailable,
    }
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

async fn is_served(server: &Server, name: &str) {
    let node = server.member(Role::Node, name).await;
    let mut agent = AgentClient::new(node.channel(&server.address).unwrap());
    let began = Instant::now();
    let report = NodeReport { node: name.into(), ..NodeReport::default() };
    agent.report_node(report).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_that_begins_many_messages_has_two_of_each_connection_taken_in_and_for_seconds()
{
    const CONNECTIONS: u64 = 30;
    const CALLS: u64 = 250;
    let server = Server::start().await;
    let token = server.token("", "", 600).await;
    let message = half(65_000);
    let offered = CONNECTIONS * CALLS * message.len() as u64;
    let before = resident_bytes();
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..CONNECTIONS {
        let channel = newcomer_channel(&server.address, &token).await.unwrap();
        for _ in 0..CALLS {
            calls.spawn(begin(channel.clone(), "Join/Join", message.clone()));
        }
    }
    let (mut refused, mut ended, mut grown) = (0, 0, 0);
    let mut was_served = false;
    while let Some(code) = calls.join_next().await {
        match code.unwrap() {
            Code::ResourceExhausted => refused += 1,
            Code::DeadlineExceeded => ended += 1,
            // A connection without a certificate lasts for 30 s.
            Code::Unavailable => {}
            code => panic!("{code:?}"),
        }
        grown = grown.max(resident_bytes().saturating_sub(before));
        if refused > CONNECTIONS * CALLS / 2 && !was_served {
            was_served = true;
            is_served(&server, "n1").await;
        }
    }
    assert!(was_served && refused > CONNECTIONS * CALLS * 9 / 10, "{refused} were refused at once");
    assert!(ended > 0, "those that were taken in end by themselves");
    assert!(grown < offered / 2, "{grown} bytes of {offered} are kept");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_begins_many_large_messages_is_bounded_and_others_are_served() {
    const CALLS: u64 = 100;
    let server = Server::start().await;
    let node = server.member(Role::Node, "n9").await;
    let message = half(4 << 20);
    let offered = CALLS * message.len() as u64;
    let before = resident_bytes();
    let mut calls = tokio::task::JoinSet::new();
    // Several connections: the window of one would hold them up by itself.
    for n in 0..CALLS {
        let channel = node.channel(&server.address).unwrap();
        let message = message.clone();
        calls.spawn(async move {
            tokio::time::sleep(Duration::from_millis(n * 5)).await;
            begin(channel, "Agent/ReportNode", message).await
        });
    }
    let (mut grown, mut refused) = (0, 0);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(9) {
        grown = grown.max(resident_bytes().saturating_sub(before));
        tokio::time::sleep(Duration::from_millis(50)).await;
        while let Some(code) = calls.try_join_next() {
            let code = code.unwrap();
            // Beyond the connections of one member there is none at all.
            assert!(matches!(code, Code::ResourceExhausted | Code::Unavailable), "{code:?}");
            refused += 1;
        }
    }
    assert!(refused > CALLS / 2, "{refused}");
    assert!(grown < offered / 2, "{grown} bytes of {offered} are kept");
    is_served(&server, "n1").await;
    server.stop().await;
}
