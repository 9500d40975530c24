//! The `calls` mode: HTTP connections that call tools, closed loop or at a fixed rate.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use memchr::memmem;
use serde::Serialize;
use serde_json::Value;

use crate::app::{self, Echo};
use crate::http::{Conn, Response};
use crate::proc;
use crate::stats::{Latencies, Summary, latencies, round};
use crate::target::{TOOL, Target};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Rpc {
    Call,
    List,
    Initialize,
    Ping,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Payload {
    /// Words and spaces, nothing to escape.
    Text,
    /// A quote, a backslash or a newline in every dozen characters, and some that are not ASCII.
    Escaped,
    /// An array of small objects.
    Nested,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Check {
    /// Status, own id and no error in each response; some are parsed whole.
    Echo,
    /// Only the status: for servers that answer with a constant.
    Status,
}

#[derive(Args, Clone, Debug)]
pub struct CallArgs {
    /// Sessions, each with its bridge.
    #[arg(long, short, default_value_t = 1)]
    pub sessions: usize,
    /// Keep-alive HTTP connections, spread over the sessions.
    #[arg(long, short, default_value_t = 16)]
    pub connections: usize,
    /// Seconds measured.
    #[arg(long, short = 't', default_value_t = 5.0)]
    pub duration: f64,
    /// Seconds run before measuring.
    #[arg(long, default_value_t = 1.0)]
    pub warmup: f64,
    /// Bytes of payload in the arguments of each call.
    #[arg(long, short, default_value_t = 100)]
    pub payload: usize,
    #[arg(long, value_enum, default_value = "text")]
    pub payload_kind: Payload,
    /// Calls a second over all connections; 0 calls again as soon as each answer is in.
    #[arg(long, default_value_t = 0.0)]
    pub rate: f64,
    /// What to call.
    #[arg(long, value_enum, default_value = "call")]
    pub rpc: Rpc,
    #[arg(long, value_enum, default_value = "echo")]
    pub check: Check,
    /// Parse every n-th response whole.
    #[arg(long, default_value_t = 100)]
    pub parse_every: u64,
    /// Milliseconds that the app takes for each call.
    #[arg(long, default_value_t = 0)]
    pub app_delay_ms: u64,
    /// Seconds after which a call counts as failed.
    #[arg(long, default_value_t = 30.0)]
    pub timeout: f64,
    /// Stop after this many calls in all, warm-up included; 0 for no such limit.
    #[arg(long, default_value_t = 0)]
    pub max_calls: u64,
}

const WARM: u8 = 0;
const MEASURE: u8 = 1;
const STOP: u8 = 2;

/// Seven digits after this one, so that patching it in place never changes the length.
const FIRST_SEQ: u64 = 1_000_000_000;
const SEQ_DIGITS: usize = 10;

struct Shared {
    args: CallArgs,
    target: Target,
    /// Body up to the payload's closing; the two sequence numbers lie in here.
    lead: Vec<u8>,
    seq_at: Vec<usize>,
    tail: Vec<u8>,
    heads: Vec<Vec<u8>>,
    phase: AtomicU8,
    seq: AtomicU64,
}

#[derive(Default)]
struct Tally {
    calls: u64,
    bytes_in: u64,
    errors: BTreeMap<String, u64>,
}

#[derive(Serialize)]
struct Server {
    cpu: proc::Cpu,
    cpu_us_per_call: f64,
    rss_kib: u64,
}

#[derive(Serialize)]
struct Report {
    mode: &'static str,
    loop_kind: &'static str,
    rpc: String,
    sessions: usize,
    connections: usize,
    payload: usize,
    rate_asked: f64,
    duration_s: f64,
    calls: u64,
    errors: u64,
    error_kinds: BTreeMap<String, u64>,
    rps: f64,
    request_bytes: usize,
    response_bytes_mean: f64,
    latency_us: Summary,
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<Server>,
    client_cpu_us_per_call: f64,
}

pub async fn run(target: Target, args: CallArgs) -> Result<Value> {
    if args.sessions == 0 || args.connections == 0 {
        bail!("--sessions and --connections must be at least 1");
    }
    let echo = Echo {
        delay: Duration::from_millis(args.app_delay_ms),
        // The WebSocket library clears its whole buffer before each read: no larger than it helps.
        buffer: (args.payload + (1 << 10)).clamp(4 << 10, 256 << 10),
    };
    let sessions = app::open(&target, 0, args.sessions, 16, Some(echo)).await?;
    let (lead, tail) = body(args.rpc, &payload(args.payload_kind, args.payload));
    let body_len = lead.len() + tail.len();
    let digits = FIRST_SEQ.to_string();
    let shared = Arc::new(Shared {
        heads: sessions.iter().map(|s| target.mcp_head(&s.id, body_len)).collect(),
        seq_at: memmem::find_iter(&lead, digits.as_bytes()).collect(),
        lead,
        tail,
        phase: AtomicU8::new(WARM),
        seq: AtomicU64::new(0),
        args: args.clone(),
        target: target.clone(),
    });

    let start = Instant::now();
    let workers: Vec<_> = (0..args.connections).map(|i| tokio::spawn(worker(shared.clone(), i, start))).collect();

    let own = [std::process::id()];
    wait(&shared, args.warmup).await;
    let (began, server_before, own_before) = (Instant::now(), proc::cpu(target.pids()), proc::cpu(&own));
    shared.phase.store(MEASURE, Ordering::Relaxed);
    wait(&shared, args.duration).await;
    shared.phase.store(STOP, Ordering::Relaxed);
    let (took, server_after, own_after) = (began.elapsed(), proc::cpu(target.pids()), proc::cpu(&own));
    let rss_kib = proc::rss_kib(target.pids());

    let mut all = latencies();
    let mut tally = Tally::default();
    for worker in workers {
        let (part, counts) = worker.await?;
        all.add(&part).context("histogram")?;
        tally.calls += counts.calls;
        tally.bytes_in += counts.bytes_in;
        for (kind, count) in counts.errors {
            *tally.errors.entry(kind).or_default() += count;
        }
    }
    app::close(&target, sessions).await;

    let per_call = |cpu: proc::Cpu| round(cpu.total() * 1e6 / tally.calls.max(1) as f64, 2);
    let report = Report {
        mode: "calls",
        loop_kind: if args.rate > 0.0 { "open" } else { "closed" },
        rpc: format!("{:?}", args.rpc).to_lowercase(),
        sessions: args.sessions,
        connections: args.connections,
        payload: args.payload,
        rate_asked: args.rate,
        duration_s: round(took.as_secs_f64(), 3),
        calls: tally.calls,
        errors: tally.errors.values().sum(),
        rps: round(tally.calls as f64 / took.as_secs_f64(), 1),
        request_bytes: shared.heads[0].len() + body_len,
        response_bytes_mean: round(tally.bytes_in as f64 / tally.calls.max(1) as f64, 1),
        error_kinds: tally.errors,
        latency_us: (&all).into(),
        server: (!target.pids().is_empty()).then(|| {
            let cpu = server_after.since(server_before);
            Server { cpu, cpu_us_per_call: per_call(cpu), rss_kib }
        }),
        client_cpu_us_per_call: per_call(own_after.since(own_before)),
    };
    Ok(serde_json::to_value(report)?)
}

/// Sleeps, or returns early once --max-calls is used up.
async fn wait(shared: &Shared, seconds: f64) {
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    while Instant::now() < until && shared.phase.load(Ordering::Relaxed) != STOP {
        let left = until - Instant::now();
        tokio::time::sleep(left.min(Duration::from_millis(50))).await;
    }
}

async fn worker(shared: Arc<Shared>, index: usize, start: Instant) -> (Latencies, Tally) {
    let args = &shared.args;
    let mut histogram = latencies();
    let mut tally = Tally::default();
    let mut conn = Conn::new(&shared.target.authority);
    let timeout = Duration::from_secs_f64(args.timeout);
    let interval = (args.rate > 0.0).then(|| Duration::from_secs_f64(args.connections as f64 / args.rate));
    let mut due = start + interval.unwrap_or_default().mul_f64(index as f64 / args.connections as f64);
    let mut session = index % shared.heads.len();
    let mut request = Vec::new();

    loop {
        let late = interval.is_none() || Instant::now() >= due;
        if !late {
            tokio::time::sleep_until(due.into()).await;
        }
        let seq = shared.seq.fetch_add(1, Ordering::Relaxed);
        if args.max_calls > 0 && seq >= args.max_calls {
            shared.phase.store(STOP, Ordering::Relaxed);
        }
        let phase = shared.phase.load(Ordering::Relaxed);
        if phase == STOP {
            return (histogram, tally);
        }
        // A call that had to wait for the one before it counts from when it was due. One that
        // was woken late counts from its start: the timer's slack is not the server's.
        let from = if interval.is_some() && late { due } else { Instant::now() };
        if let Some(interval) = interval {
            due += interval;
        }

        let id = FIRST_SEQ + seq;
        request.clear();
        request.extend_from_slice(&shared.heads[session]);
        let lead_at = request.len();
        request.extend_from_slice(&shared.lead);
        let mut digits = [0; SEQ_DIGITS];
        write_digits(id, &mut digits);
        for at in &shared.seq_at {
            request[lead_at + at..][..SEQ_DIGITS].copy_from_slice(&digits);
        }
        session = (session + args.connections) % shared.heads.len();

        let outcome = match tokio::time::timeout(timeout, conn.call(&request, &shared.tail)).await {
            Err(_) => Err("timeout".to_owned()),
            Ok(Err(error)) => Err(format!("{error:#}")),
            Ok(Ok(response)) => {
                let whole = args.parse_every > 0 && seq.is_multiple_of(args.parse_every);
                check(args, &response, id, &digits, whole).map(|()| response.body.len())
            }
        };
        let done = phase == MEASURE && shared.phase.load(Ordering::Relaxed) == MEASURE;
        match outcome {
            Ok(bytes) if done => {
                tally.calls += 1;
                tally.bytes_in += bytes as u64;
                histogram.saturating_record(from.elapsed().as_micros() as u64);
            }
            Ok(_) => {}
            Err(kind) => {
                conn = Conn::new(&shared.target.authority);
                if shared.phase.load(Ordering::Relaxed) != STOP {
                    *tally.errors.entry(kind).or_default() += 1;
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
    }
}

fn write_digits(mut value: u64, digits: &mut [u8; SEQ_DIGITS]) {
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
    }
}

fn check(args: &CallArgs, response: &Response, id: u64, digits: &[u8], whole: bool) -> Result<(), String> {
    if response.status != 200 {
        return Err(format!("status {}", response.status));
    }
    if args.check == Check::Status {
        return Ok(());
    }
    let body = response.body;
    let first = &body[..body.len().min(512)];
    let last = &body[body.len().saturating_sub(256)..];
    let has = |needle: &[u8]| memmem::find(first, needle).or(memmem::find(last, needle)).is_some();
    if has(b"\"error\":") || has(b"\"isError\":true") {
        return Err(format!("error reply: {}", String::from_utf8_lossy(&body[..body.len().min(200)])));
    }
    if !has(digits) {
        return Err("reply to another call".to_owned());
    }
    if whole { check_whole(args, body, id).map_err(|e| format!("{e:#}")) } else { Ok(()) }
}

/// Parses the reply, plain JSON or one server-sent event, and finds the arguments echoed in it.
fn check_whole(args: &CallArgs, body: &[u8], id: u64) -> Result<()> {
    let text = std::str::from_utf8(body)?;
    let json = match text.lines().find_map(|line| line.strip_prefix("data: ").filter(|d| !d.trim().is_empty())) {
        Some(data) if !text.starts_with('{') => data,
        _ => text,
    };
    let reply: Value = serde_json::from_str(json).context("reply is not JSON")?;
    if reply["id"] != id {
        bail!("reply has another id");
    }
    let result = &reply["result"];
    if !result.is_object() {
        bail!("reply has no result");
    }
    if args.rpc != Rpc::Call {
        return Ok(());
    }
    let inner: Value = match result["content"][0]["text"].as_str() {
        Some(text) => serde_json::from_str(text).context("content text is not the echoed JSON")?,
        None => bail!("reply has no text content"),
    };
    if inner["seq"] != id {
        bail!("another call's content");
    }
    match result.get("structuredContent") {
        Some(structured) if !structured.is_null() && *structured != inner => {
            bail!("structuredContent differs from the text")
        }
        _ => Ok(()),
    }
}

/// A JSON value of about `bytes` bytes.
fn payload(kind: Payload, bytes: usize) -> String {
    let repeat = |unit: &str| unit.repeat(bytes / unit.len() + 1);
    match kind {
        Payload::Text => format!("\"{}\"", &repeat("lorem ipsum dolor sit amet ")[..bytes]),
        Payload::Escaped => {
            let unit = r#"he said \"no\" \\ yes\n\u00e9t\u00e9 été "#;
            format!("\"{}\"", unit.repeat((bytes / unit.len()).max(1)))
        }
        Payload::Nested => {
            let unit = r#"{"id":12345,"name":"item","tags":["a","b"],"price":12.5,"ok":true}"#;
            let count = (bytes / (unit.len() + 1)).max(1);
            format!("[{}]", vec![unit; count].join(","))
        }
    }
}

/// The request body in two parts: the first holds the sequence numbers, the second is the same for all.
fn body(rpc: Rpc, payload: &str) -> (Vec<u8>, Vec<u8>) {
    let seq = FIRST_SEQ;
    let (lead, tail) = match rpc {
        Rpc::Call => (
            format!(
                r#"{{"jsonrpc":"2.0","id":{seq},"method":"tools/call","params":{{"name":"{TOOL}","arguments":{{"seq":{seq},"text":"#
            ),
            format!("{payload}}}}}}}"),
        ),
        Rpc::List => (format!(r#"{{"jsonrpc":"2.0","id":{seq},"method":"tools/list"}}"#), String::new()),
        Rpc::Ping => (format!(r#"{{"jsonrpc":"2.0","id":{seq},"method":"ping"}}"#), String::new()),
        Rpc::Initialize => (
            format!(
                r#"{{"jsonrpc":"2.0","id":{seq},"method":"initialize","params":{{"protocolVersion":"2025-03-26","capabilities":{{}},"clientInfo":{{"name":"bridge-load","version":"0"}}}}}}"#
            ),
            String::new(),
        ),
    };
    (lead.into_bytes(), tail.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_body_is_json_and_carries_the_sequence() {
        for kind in [Payload::Text, Payload::Escaped, Payload::Nested] {
            let (lead, tail) = body(Rpc::Call, &payload(kind, 1000));
            let whole: Value = serde_json::from_slice(&[lead, tail].concat()).unwrap();
            assert_eq!(whole["params"]["arguments"]["seq"], FIRST_SEQ);
            assert_eq!(whole["id"], FIRST_SEQ);
        }
        for rpc in [Rpc::List, Rpc::Ping, Rpc::Initialize] {
            let (lead, _) = body(rpc, "");
            assert!(serde_json::from_slice::<Value>(&lead).is_ok());
        }
    }

    #[test]
    fn digits_keep_their_width() {
        let mut digits = [0; SEQ_DIGITS];
        write_digits(FIRST_SEQ + 42, &mut digits);
        assert_eq!(&digits, b"1000000042");
    }

    #[test]
    fn whole_check_reads_plain_and_event_replies() {
        use clap::Parser;
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            call: CallArgs,
        }
        let args = Cli::parse_from(["t"]).call;
        let json = r#"{"jsonrpc":"2.0","id":7,"result":{"content":[{"type":"text","text":"{\"seq\":7}"}],"structuredContent":{"seq":7}}}"#;
        check_whole(&args, json.as_bytes(), 7).unwrap();
        check_whole(&args, format!("event: message\r\ndata: {json}\r\n\r\n").as_bytes(), 7).unwrap();
        assert!(check_whole(&args, json.as_bytes(), 8).is_err());
    }
}
