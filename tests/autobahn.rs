//! The WebSocket protocol itself: the Autobahn testsuite against a socket with a bridge's settings.

use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use openclaw_mcp_proxy::proxy::bridge::socket::server_socket;
use openclaw_mcp_proxy::proxy::config::Config;
use openclaw_mcp_proxy::proxy::connection::{Busy, ClientStream, Clocks};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

/// How long the suite may take; it takes 20 s.
const SUITE_PATIENCE: Duration = Duration::from_secs(400);

/// Takes a connection through the handshake and sends back whatever comes, on a socket like that of a bridge.
async fn echo(mut stream: TcpStream) -> Option<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?;
    let mut headers = head.lines().filter_map(|line| line.split_once(": "));
    let (_, key) = headers.find(|(name, _)| name.eq_ignore_ascii_case("sec-websocket-key"))?;
    let accept = derive_accept_key(key.as_bytes());
    let answer = format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
    );
    stream.write_all(answer.as_bytes()).await.ok()?;
    let config = Config::from_pairs([]).unwrap();
    let clocks = Clocks { head: config.header_timeout.0, idle: config.idle.0, write_stall: config.write_stall.0 };
    let stream = ClientStream::new(stream, Busy::default(), clocks).upgraded(Bytes::new());
    let mut socket = server_socket(stream, config.max_bridge_message_bytes);
    while let Some(Ok(message)) = socket.next().await {
        if (message.is_text() || message.is_binary()) && socket.send(message).await.is_err() {
            break;
        }
    }
    socket.close().await.ok()
}

#[tokio::test]
#[ignore = "needs Python 2.7 and takes 20 s; tests/run --heavy runs it"]
async fn a_bridges_socket_passes_the_autobahn_testsuite() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("ws://{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(echo(stream));
        }
    });
    let suite = Command::new("tests/autobahn.sh").arg(url).kill_on_drop(true).output();
    let output = tokio::time::timeout(SUITE_PATIENCE, suite).await.expect("the suite hangs").unwrap();
    serving.abort();
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
