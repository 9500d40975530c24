//! Clients that are slow on purpose, many at once, against the program itself: slowhttptest, and readers of its kind.
//! Whatever they do, they are gone when their time is over, and everybody else is served meanwhile.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

use crate::program::serving;
use crate::support::{App, http, send, soon, timed, until};

/// How many connections are held at once.
const HELD: usize = 200;
/// The clocks of these tests, in seconds.
const CLOCKS: [(&str, &str); 6] = [
    ("LISTEN", "127.0.0.1:0"),
    ("HEADER_TIMEOUT_SECONDS", "3"),
    ("BODY_IDLE_SECONDS", "2"),
    ("BODY_TIMEOUT_SECONDS", "4"),
    ("IDLE_SECONDS", "3"),
    ("WRITE_STALL_SECONDS", "3"),
];
/// The longest of those, and what a busy machine adds; connections are closed over two more seconds.
const MOST: Duration = Duration::from_secs(4 + 2 + 4);

/// The program, and somebody who asks all the time whether it is well.
struct Besieged {
    program: Child,
    base: String,
    asking: JoinHandle<()>,
}

impl Besieged {
    async fn start() -> Self {
        let (program, base) = serving(&CLOCKS).await;
        let health = format!("{base}/health");
        let asking = tokio::spawn(async move {
            let client = http();
            loop {
                let (reply, took) = timed(send(client.get(&health))).await;
                assert_eq!((reply.status, &*reply.text), (200, "ok"));
                assert!(took < Duration::from_secs(2), "everybody else waits {took:?}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Besieged { program, base, asking }
    }

    /// How many sockets the program has, in whatever state.
    fn sockets(&self) -> usize {
        let folder = format!("/proc/{}/fd", self.program.id().expect("it runs"));
        let files = std::fs::read_dir(folder).unwrap();
        let is_socket = |target: std::path::PathBuf| target.to_string_lossy().starts_with("socket:");
        files.filter(|file| std::fs::read_link(file.as_ref().unwrap().path()).is_ok_and(is_socket)).count()
    }

    /// Waits until many connections are held, and until they are gone again.
    async fn withstands(&self) {
        let others = 10;
        until(async || self.sockets() > HELD / 2).await;
        let ((), took) = timed(until(async || self.sockets() < others)).await;
        assert!(took < MOST, "they were held for {took:?}");
        assert!(!self.asking.is_finished(), "somebody else was not served");
    }
}

impl Drop for Besieged {
    fn drop(&mut self) {
        self.asking.abort();
    }
}

/// Holds so many connections in slowhttptest's way.
fn attack(url: &str, how: &[&str]) -> Child {
    let connections = HELD.to_string();
    Command::new("slowhttptest")
        .args(["-c", &connections, "-r", &connections, "-i", "1", "-x", "8", "-l", "30", "-u", url])
        .args(how)
        .current_dir(env!("CARGO_TARGET_TMPDIR"))
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("slowhttptest is missing: run tests/run, which installs it")
}

#[tokio::test]
async fn headers_that_come_slowly_hold_no_connection() {
    let besieged = Besieged::start().await;
    let _attack = attack(&format!("{}/health", besieged.base), &["-H"]);
    besieged.withstands().await;
}

#[tokio::test]
async fn bodies_that_come_slowly_hold_no_connection() {
    let besieged = Besieged::start().await;
    let app = App::register_at(&besieged.base, serde_json::json!({ "device_id": "d" })).await;
    let _attack = attack(&app.mcp_url, &["-B", "-f", "application/json", "-s", "8192"]);
    besieged.withstands().await;
}

#[tokio::test]
async fn answers_that_are_read_slowly_hold_no_connection() {
    let besieged = Besieged::start().await;
    let how = ["-X", "-k", "10", "-w", "1", "-y", "8", "-n", "1", "-z", "1"];
    let _attack = attack(&format!("{}/health", besieged.base), &how);
    besieged.withstands().await;
}

#[tokio::test]
async fn long_answers_that_are_read_slowly_hold_no_connection() {
    let besieged = Besieged::start().await;
    let tools: Vec<_> =
        (0..32).map(|n| serde_json::json!({ "name": format!("t{n}"), "description": "x".repeat(60_000) })).collect();
    let app = App::register_at(&besieged.base, serde_json::json!({ "device_id": "d", "tools": tools })).await;
    let authority = besieged.base.strip_prefix("http://").unwrap();
    let path = app.mcp_url.strip_prefix(&besieged.base).unwrap();
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: {authority}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    // slowhttptest sends no bodies that make sense, so these readers are our own.
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..HELD {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(2048).unwrap();
        let (address, request) = (authority.parse().unwrap(), request.clone());
        readers.spawn(async move {
            let mut stream = socket.connect(address).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            while stream.read(&mut [0; 5]).await.is_ok_and(|read| read > 0) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
    }
    besieged.withstands().await;
    soon(readers.shutdown()).await;
}
