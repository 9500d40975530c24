//! Large and twisted inputs cost what their bytes cost: no more work, and no more memory. Measured from outside, on the
//! program itself, for what its peers do takes processor time and memory, too.

use serde_json::{Value, json};

use crate::program::serving;
use crate::support::{App, McpClient, Reply, http, send};

const MB: usize = 1_000_000;

/// The program, and its numbers.
struct Measured {
    child: tokio::process::Child,
    base: String,
}

impl Measured {
    async fn start(settings: &[(&str, &str)]) -> Self {
        let (child, base) = serving(&[&[("LISTEN", "127.0.0.1:0"), ("LOG", "info")], settings].concat()).await;
        Measured { child, base }
    }

    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.child.id().unwrap())).unwrap()
    }

    /// `VmRSS` is what it has, `VmHWM` the most that it has had.
    fn memory(&self, kind: &str) -> usize {
        let status = self.read("status");
        let line = status.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(':'));
        line.unwrap().split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
    }

    /// The processor time that it has taken, in hundredths of a second.
    fn ticks(&self) -> u64 {
        let stat = self.read("stat");
        let numbers: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        numbers[11].parse::<u64>().unwrap() + numbers[12].parse::<u64>().unwrap()
    }

    async fn register(&self, registration: String) -> Reply {
        let request = http().post(format!("{}/v1/chat/sessions", self.base)).body(registration);
        send(request.header("content-type", "application/json")).await
    }

    async fn app(&self, registration: Value) -> App {
        App::register_at(&self.base, registration).await
    }
}

/// The text of so many annotated properties, as the members of an object.
fn annotated(count: usize) -> String {
    let property = |n| format!(r#""p{n}":{{"type":"string","x-mcp-header":"h{n}"}}"#);
    (0..count).map(property).collect::<Vec<_>>().join(",")
}

#[tokio::test]
async fn arguments_are_read_once_for_all_headers_that_repeat_some() {
    let program = Measured::start(&[]).await;
    let arguments: Value = json!({ "o": { "o": { "a": "x,".repeat(2000), "numbers": vec![0; MB] } } });
    let mut took = Vec::new();
    for headers in [1, 64] {
        let inside = format!(r#"{{"properties":{{{}}}}}"#, annotated(headers));
        let schema = format!(r#"{{"properties":{{"o":{{"properties":{{"o":{inside}}}}}}}}}"#);
        let tool = json!({ "name": "t", "input_schema": serde_json::from_str::<Value>(&schema).unwrap() });
        let app = program.app(json!({ "device_id": "d", "tools": [tool] })).await;
        let before = program.ticks();
        let call = json!({ "name": "t", "arguments": arguments });
        let reply = app.client().modern("tools/call", call).await;
        assert_eq!(reply.tool_text(), "Bridge is not connected.");
        took.push(program.ticks() - before);
    }
    assert!(took[1] < 4 * took[0] + 20, "one header and 64: {took:?} hundredths of a second");
}

#[tokio::test]
async fn a_session_keeps_little_more_than_its_registration() {
    const EACH: usize = 6;
    let program = Measured::start(&[]).await;
    // Many paths with a long beginning in common, and many long paths.
    let wide = |n| {
        let below = format!(r#""{}":{{"properties":{{{}}}}}"#, "k".repeat(33_000), annotated(64));
        format!(r#"{{"name":"t{n}","input_schema":{{"properties":{{{below}}}}}}}"#)
    };
    let deep = |n| {
        let leaf = |m: usize| format!(r#"{{"type":"string","x-mcp-header":"h{m}"}}"#);
        let chain = |m| (0..25).fold(leaf(m), |below, _| format!(r#"{{"properties":{{"a":{below}}}}}"#));
        let chains: Vec<String> = (0..64).map(|m| format!(r#""p{m}":{}"#, chain(m))).collect();
        format!(r#"{{"name":"t{n}","input_schema":{{"properties":{{{}}}}}}}"#, chains.join(","))
    };
    for tools in [(0..50).map(wide).collect::<Vec<_>>(), (0..50).map(deep).collect()] {
        let body = format!(r#"{{"device_id":"d","tools":[{}]}}"#, tools.join(","));
        // What one takes for a moment is there for the next.
        for _ in 0..2 {
            let reply = program.register(body.clone()).await;
            assert_eq!(reply.status, 200, "{}", reply.text);
        }
        let before = program.memory("VmRSS");
        for _ in 0..EACH {
            program.register(body.clone()).await;
        }
        let kept = program.memory("VmRSS").saturating_sub(before) / EACH;
        assert!(kept < 5 * body.len(), "{kept} bytes are kept of {}", body.len());
    }
}

#[tokio::test]
async fn a_cancellation_costs_no_memory_however_long_its_id_is() {
    let program = Measured::start(&[]).await;
    let client = program.app(json!({ "device_id": "d" })).await.client();
    let cancel = async |n: usize| {
        let id = format!("{n}{}", "x".repeat(4 * MB));
        let note = json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": id } });
        assert_eq!(client.post(note.to_string()).await.status, 202);
    };
    cancel(0).await;
    let before = program.memory("VmRSS");
    for n in 1..=30 {
        cancel(n).await;
    }
    let kept = program.memory("VmRSS").saturating_sub(before);
    assert!(kept < 40 * MB, "{kept} bytes are kept");
}

#[tokio::test]
async fn an_array_with_too_many_elements_is_not_kept() {
    let program = Measured::start(&[]).await;
    let app = program.app(json!({ "device_id": "d", "bridge_features": ["tools"] })).await;
    let ones = |count: usize| format!("[{}1]", "1,".repeat(count));
    let before = program.memory("VmHWM");
    let batch = app.client().post(ones(2 * MB)).await;
    assert_eq!(batch.status, 400);
    assert!(batch.text.contains("1 to 64 messages"), "{}", batch.text);
    let took = program.memory("VmHWM") - before;
    assert!(took < 20 * MB, "{took} bytes for a batch of 4 MB");

    let mut bridge = app.connect().await;
    let before = program.memory("VmHWM");
    bridge.send_text(format!(r#"{{"type":"update_tools","tools":{}}}"#, ones(8 * MB))).await;
    let refused = bridge.recv().await["message"].to_string();
    assert!(refused.contains("more than 512 tools are given; the limit is 512"), "{refused}");
    let took = program.memory("VmHWM") - before;
    assert!(took < 90 * MB, "{took} bytes for a frame of 16 MB");
}

#[tokio::test]
async fn a_batch_keeps_no_more_answers_than_one_may_take() {
    let settings = [("MAX_INSTRUCTIONS_BYTES", "4000000"), ("MAX_RESULT_BYTES", "10000000")];
    let program = Measured::start(&settings).await;
    let app = program.app(json!({ "device_id": "d", "instructions": "i".repeat(4 * MB) })).await;
    let client = McpClient::new(&app.mcp_url);
    let messages: Vec<Value> =
        (0..64).map(|id| json!({ "jsonrpc": "2.0", "id": id, "method": "initialize" })).collect();
    let before = program.memory("VmHWM");
    let answers = client.post(json!(messages).to_string()).await.json();
    let took = program.memory("VmHWM") - before;
    let answers = answers.as_array().unwrap();
    assert!(answers.iter().enumerate().all(|(id, answer)| answer["id"] == id), "each has its place");
    let (answered, refused): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer["result"].is_object());
    assert_eq!((answered.len(), refused.len()), (2, 62));
    assert!(refused.iter().all(|answer| answer["error"]["code"] == 413));
    assert!(took < 50 * MB, "{took} bytes for answers of 10 MB");
}
