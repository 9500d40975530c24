//! Requests that the front and the proxy could read differently.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{Front, Kind};
use crate::support::{App, TestServer, http, send};

/// Sends raw bytes and reads until the other end closes, or for `wait` at the most.
async fn raw(port: u16, bytes: &[u8], wait: Duration) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let mut answer = Vec::new();
    // A peer that has seen enough may close before all is written.
    let _reset = stream.write_all(bytes).await;
    let _timed_out = tokio::time::timeout(wait, stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// Requests that two servers may read differently. In each, what one of them takes for the end of the request's body
/// is followed by a request that deletes the session.
fn smuggling(app: &App) -> Vec<(&'static str, String)> {
    let id = &app.id;
    let auth = "Authorization: Bearer app-token\r\n";
    let tail = format!("DELETE /v1/chat/sessions/{id} HTTP/1.1\r\nHost: localhost\r\n{auth}\r\n");
    let head = |lines: &str| {
        format!(
            "POST /v1/chat/sessions HTTP/1.1\r\nHost: localhost\r\n{auth}Content-Type: application/json\r\n{lines}\r\n"
        )
    };
    let chunk = format!("{:x}\r\n{tail}\r\n0\r\n\r\n", tail.len());
    let all = 5 + tail.len();
    let ended = format!("0\r\n\r\n{tail}");
    vec![
        (
            "CL and TE, the length goes on",
            head(&format!("Content-Length: {all}\r\nTransfer-Encoding: chunked\r\n")) + &ended,
        ),
        (
            "TE and CL, the length goes on",
            head(&format!("Transfer-Encoding: chunked\r\nContent-Length: {all}\r\n")) + &ended,
        ),
        ("CL and TE, the chunks go on", head("Content-Length: 4\r\nTransfer-Encoding: chunked\r\n") + &chunk),
        ("TE and CL, the chunks go on", head("Transfer-Encoding: chunked\r\nContent-Length: 4\r\n") + &chunk),
        ("two lengths", head(&format!("Content-Length: 0\r\nContent-Length: {}\r\n", tail.len())) + &tail),
        ("two lengths in one line", head(&format!("Content-Length: 0, {}\r\n", tail.len())) + &tail),
        ("a signed length", head("Content-Length: +0\r\n") + &tail),
        ("a length with a space in it", head("Content-Length: 0 0\r\n") + &tail),
        ("a length in hexadecimal", head(&format!("Content-Length: 0x{:x}\r\n", tail.len())) + &tail),
        ("a space before the colon", head("Transfer-Encoding : chunked\r\n") + &ended),
        ("a folded line", head("Transfer-Encoding:\r\n chunked\r\n") + &ended),
        ("a folded line of a length", head(&format!("X: a\r\n Content-Length: {}\r\n", tail.len())) + &tail),
        ("a NUL in a value", head("X: a\0b\r\nContent-Length: 0\r\n") + &tail),
        ("a NUL in a name", head("X\0: a\r\nContent-Length: 0\r\n") + &tail),
        ("an unknown coding", head("Transfer-Encoding: xchunked\r\n") + &ended),
        ("a coding with a control character", head("Transfer-Encoding: \x0bchunked\r\n") + &ended),
        ("two codings", head("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n") + &ended),
        ("chunked is not the last coding", head("Transfer-Encoding: chunked, gzip\r\n") + &ended),
        ("a chunk of no size", head("Transfer-Encoding: chunked\r\n") + "\r\n\r\n" + &tail),
        ("a chunk that is too large", head("Transfer-Encoding: chunked\r\n") + "10000000000000000\r\n\r\n" + &tail),
        ("a chunk whose end is missing", head("Transfer-Encoding: chunked\r\n") + "2\r\n{}x\r\n0\r\n\r\n" + &tail),
        ("a bare LF before a coding", head("X: a\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n") + &chunk),
        ("a bare CR in a value", head("X: a\rTransfer-Encoding: chunked\r\nContent-Length: 4\r\n") + &chunk),
        ("HTTP/1.0 with a coding", head("Transfer-Encoding: chunked\r\n").replace("HTTP/1.1", "HTTP/1.0") + &ended),
        ("no version", format!("GET /health\r\n{tail}")),
    ]
}

/// No request within a request is carried out, and no answer says that something broke.
///
/// Fronts make one reading of what has two, and some read two whole requests then, answer both, and pass on two, each
/// with one length. That deceives nobody; what the front does not know of, though, must not happen behind it.
async fn nothing_is_smuggled(base: &str, is_front: bool) {
    let port = base.rsplit(':').next().unwrap().parse().unwrap();
    let register = async || App::register_at_as(base, json!({ "device_id": "d" }), "app-token").await;
    let names: Vec<_> = smuggling(&register().await).into_iter().map(|(case, _)| case).collect();
    for (at, case) in names.into_iter().enumerate() {
        let app = register().await;
        let (_, bytes) = smuggling(&app).swap_remove(at);
        let answer = raw(port, bytes.as_bytes(), Duration::from_millis(500)).await;
        let statuses: Vec<&str> = answer.split("HTTP/1.").skip(1).filter_map(|rest| rest.get(2..5)).collect();
        // A front may say so of a coding that it does not have, or of a body that it cannot pass on.
        let is_broken = |status: &&str| status.starts_with('5') && !(is_front && ["501", "502"].contains(status));
        assert!(!statuses.iter().any(is_broken), "{case}: {answer}");
        assert!(statuses.len() <= if is_front { 2 } else { 1 }, "{case}: {answer}");
        // Whoever comes next gets his own answer, on whichever connection the front takes.
        for _ in 0..3 {
            assert_eq!(send(http().get(format!("{base}/health"))).await.text, "ok", "{case}");
        }
        let session = format!("{base}/v1/chat/sessions/{}", app.id);
        let status = send(http().get(session).bearer_auth("app-token")).await.status;
        let expected = if statuses.len() == 2 && statuses[1] == "200" { 404 } else { 200 };
        assert_eq!(status, expected, "{case}: {answer}");
    }
}

#[tokio::test]
async fn nothing_is_smuggled_into_the_proxy() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")]).await;
    nothing_is_smuggled(&server.base, false).await;
}

async fn nothing_is_smuggled_through(kind: Kind) {
    let front = Front::start(kind, &[]).await;
    nothing_is_smuggled(&front.base, true).await;
}

#[tokio::test]
async fn nothing_is_smuggled_through_nginx() {
    nothing_is_smuggled_through(Kind::Nginx).await;
}

#[tokio::test]
async fn nothing_is_smuggled_through_haproxy() {
    nothing_is_smuggled_through(Kind::Haproxy).await;
}

#[tokio::test]
async fn nothing_is_smuggled_through_caddy() {
    nothing_is_smuggled_through(Kind::Caddy).await;
}

#[tokio::test]
async fn nothing_is_smuggled_through_traefik() {
    nothing_is_smuggled_through(Kind::Traefik).await;
}
