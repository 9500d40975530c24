//! Noisy neighbours: how long one tenant's calls take while another one asks all that it may of the same proxy.
//!
//! Whoever makes noise also takes processor time, which no proxy can give back. So the same noise is made at a second
//! proxy as well, on the same machine, from the same clients: what is worse beside it on the *same* proxy is the
//! proxy's own doing. To see the numbers, of the release build:
//!
//! ```sh
//! cargo test --release -- --ignored --nocapture noisy
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::task::{JoinHandle, JoinSet};
use tokio_tungstenite::tungstenite::Message;

use crate::program::serving;
use crate::support::{App, Bridge, McpClient, soon, tools};

/// How long each measurement takes.
const TIME: Duration = Duration::from_secs(4);
/// How much worse the slowest hundredth of calls may be beside the noise than with the noise elsewhere. Measured were
/// 1 to 4 with the release build on two processors; one that lets a tenant hold up another is far beyond.
const MOST: f64 = 10.0;

#[derive(Debug, Clone, Copy)]
enum Noise {
    /// 157 tools of 2 kB, listed over 64 connections.
    Lists,
    /// Results of 10 MB.
    Results,
    /// A bridge that reads nothing, its queue full, and clients who go on calling.
    FullQueue,
    /// Arguments of 4 MB.
    Arguments,
    /// An app that sends small frames as fast as it can.
    Frames,
    /// An app that changes its 157 tools all the time.
    Updates,
}

/// Ends what it holds when it drops.
struct Noisy(JoinSet<()>, Vec<JoinHandle<()>>, Option<Bridge>);

impl Drop for Noisy {
    fn drop(&mut self) {
        self.1.iter().for_each(JoinHandle::abort);
    }
}

fn large_tools() -> Value {
    (0..157).map(|n| json!({ "name": format!("tool_{n}"), "description": "x".repeat(1950) })).collect()
}

impl Noise {
    async fn begin(self, base: &str) -> Noisy {
        let registration = match self {
            Noise::Lists | Noise::Updates => {
                json!({ "device_id": "a", "tools": large_tools(), "bridge_features": ["tools"] })
            }
            _ => json!({ "device_id": "a", "tools": tools(&["t"]) }),
        };
        let app = App::register_at_as(base, registration, "app-token-of-alice").await;
        let mut noisy = Noisy(JoinSet::new(), Vec::new(), None);
        let bridge = app.connect().await;
        let call = |arguments: usize| {
            let x = "x".repeat(arguments);
            format!(
                r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"t","arguments":{{"x":"{x}"}}}}}}"#
            )
        };
        let (clients, body) = match self {
            Noise::Lists => (64, r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#.to_owned()),
            Noise::Results => (4, call(0)),
            Noise::FullQueue => (8, call(1_000_000)),
            Noise::Arguments => (4, call(4_000_000)),
            Noise::Frames | Noise::Updates => (0, String::new()),
        };
        match self {
            Noise::FullQueue => noisy.2 = Some(bridge),
            Noise::Frames => noisy.1.push(flood(bridge, r#"{"type":"pong"}"#.to_owned())),
            Noise::Updates => {
                noisy.1.push(flood(bridge, json!({ "type": "update_tools", "tools": large_tools() }).to_string()));
            }
            Noise::Results => noisy.1.push(answer(bridge, "x".repeat(10_000_000))),
            Noise::Lists | Noise::Arguments => noisy.1.push(answer(bridge, String::new())),
        }
        let body: Arc<str> = body.into();
        for _ in 0..clients {
            let (client, body) = (app.client().header("authorization", "Bearer claw-token-of-alice"), body.clone());
            noisy.0.spawn(async move {
                loop {
                    // What comes is taken, and not looked at.
                    if let Ok(response) = client.request(&*body).send().await {
                        let mut pieces = response.bytes_stream();
                        while let Some(Ok(_)) = pieces.next().await {}
                    }
                }
            });
        }
        noisy
    }
}

fn flood(bridge: Bridge, frame: String) -> JoinHandle<()> {
    let (mut sink, mut stream) = bridge.socket.split();
    tokio::spawn(async move {
        let sending = async { while sink.feed(Message::text(frame.clone())).await.is_ok() {} };
        let reading = async { while let Some(Ok(_)) = stream.next().await {} };
        tokio::join!(sending, reading);
    })
}

/// Answers each call, with as little work as possible.
fn answer(mut bridge: Bridge, content: String) -> JoinHandle<()> {
    tokio::spawn(async move {
        while let Some(Ok(message)) = bridge.socket.next().await {
            let Message::Text(text) = message else { continue };
            let Some((_, rest)) = text.split_once(r#""request_id":""#) else { continue };
            let id = rest.split('"').next().unwrap();
            let frame = format!(r#"{{"type":"invoke_result","request_id":"{id}","ok":true,"content":"{content}"}}"#);
            if bridge.socket.send(Message::text(frame)).await.is_err() {
                return;
            }
        }
    })
}

/// The median and the 99th percentile of a calm tenant's calls, in milliseconds.
async fn measure(client: &McpClient) -> (f64, f64) {
    let mut times = Vec::new();
    let end = Instant::now() + TIME;
    while Instant::now() < end {
        let start = Instant::now();
        let reply = soon(client.call("echo", r#"{"a":1}"#)).await;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        assert!(!reply.is_tool_error(), "{}", reply.text);
    }
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

/// A proxy with two tenants.
async fn proxy() -> (tokio::process::Child, String, std::path::PathBuf) {
    use sha2::Digest;
    let hash = |token: &str| {
        sha2::Sha256::digest(token.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let tenant = |name: &str| {
        let (app, claw) = (hash(&format!("app-token-of-{name}")), hash(&format!("claw-token-of-{name}")));
        format!("[[tenant]]\nname = \"{name}\"\napp_token_sha256 = [\"{app}\"]\nopenclaw_token_sha256 = [\"{claw}\"]\n")
    };
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("noisy-{}.toml", uuid::Uuid::new_v4()));
    std::fs::write(&file, tenant("alice") + &tenant("bob")).unwrap();
    let settings = [
        ("LISTEN", "127.0.0.1:0"),
        ("TENANTS_FILE", file.to_str().unwrap()),
        ("WRITE_STALL_SECONDS", "600"),
        ("LOG", "warn,openclaw_mcp_proxy=info"),
    ];
    let (child, base) = serving(&settings).await;
    (child, base, file)
}

#[ignore = "it measures for a minute and a half, and wants the machine for itself"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_noisy_neighbour_costs_no_more_than_the_processor_time_that_it_takes() {
    let (_here, here, file_here) = proxy().await;
    let (_elsewhere, elsewhere, file_elsewhere) = proxy().await;
    let bob =
        App::register_at_as(&here, json!({ "device_id": "b", "tools": tools(&["echo"]) }), "app-token-of-bob").await;
    bob.connect().await.echo();
    let client = bob.client().header("authorization", "Bearer claw-token-of-bob");
    measure(&client).await;
    let alone = measure(&client).await;
    println!("a call, median and 99th percentile: alone {:.2} ms, {:.2} ms", alone.0, alone.1);
    let mut worst: f64 = 0.0;
    for noise in [Noise::Lists, Noise::Results, Noise::FullQueue, Noise::Arguments, Noise::Frames, Noise::Updates] {
        let mut measured = Vec::new();
        for base in [&elsewhere, &here] {
            let _noisy = noise.begin(base).await;
            // Queues fill, connections open.
            tokio::time::sleep(Duration::from_secs(1)).await;
            measured.push(measure(&client).await);
        }
        let (apart, beside) = (measured[0], measured[1]);
        let (p50, p99) = (beside.0 / apart.0, beside.1 / apart.1);
        println!(
            "{noise:?}: elsewhere {:.2} ms, {:.2} ms; here {:.2} ms, {:.2} ms; {p50:.1} times, {p99:.1} times",
            apart.0, apart.1, beside.0, beside.1
        );
        worst = worst.max(p99);
    }
    for file in [file_here, file_elsewhere] {
        std::fs::remove_file(file).unwrap();
    }
    assert!(worst <= MOST, "{worst:.1} times");
}
