//! Traces: what the client says of them reaches the app, and what the proxy adds reaches a collector.

use std::path::Path;
use std::process::Stdio;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::net::TcpListener;
use tokio::process::{Child, ChildStdout, Command};

use crate::clients::clients_dir;
use crate::program::{Log, PROGRAM, program, program_by};
use crate::support::{App, Bridge, McpClient, PATIENCE, TestServer, free_port, http, send, soon, timed, tools, until};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const OTHER: &str = "00-11111111111111111111111111111111-2222222222222222-01";

/// A collector that reads spans with OpenTelemetry's own messages.
struct Collector {
    endpoint: String,
    lines: Lines<BufReader<ChildStdout>>,
    process: Child,
}

impl Collector {
    async fn start() -> Self {
        Self::refusing(0).await
    }

    /// One that refuses so many spans of each request.
    async fn refusing(spans: usize) -> Self {
        let interpreter = clients_dir().join("py-otlp/bin/python");
        assert!(interpreter.exists(), "{} is missing: run tests/run, which installs it", interpreter.display());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/otlp.py");
        let mut command = Command::new(interpreter);
        command.arg(script).arg(spans.to_string()).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let port = soon(lines.next_line()).await.unwrap().expect("the collector says its port");
        Collector { endpoint: format!("http://127.0.0.1:{port}"), lines, process }
    }

    /// A server that sends its spans here, one call a request, and what else is set.
    async fn server(&self, settings: &[(&str, &str)]) -> TestServer {
        let ours = [("OTEL_EXPORTER_OTLP_ENDPOINT", &*self.endpoint), ("OTEL_BSP_SCHEDULE_DELAY", "0")];
        TestServer::start(&[&ours, settings].concat()).await
    }

    /// The next request.
    async fn request(&mut self) -> Value {
        let line = soon(self.lines.next_line()).await.unwrap().expect("the collector has ended");
        serde_json::from_str(&line).unwrap()
    }

    /// How many requests are left when the server has stopped: it has waited for each one's answer.
    async fn left(mut self) -> usize {
        self.process.kill().await.unwrap();
        let mut left = 0;
        while soon(self.lines.next_line()).await.unwrap().is_some() {
            left += 1;
        }
        left
    }

    /// The spans of the next call: the server's, and the client's if there is one.
    async fn spans(&mut self) -> (Value, Option<Value>) {
        let request = self.request().await;
        let mut spans = request["spans"].as_array().unwrap().iter().cloned();
        let (server, client) = (spans.next().unwrap(), spans.next());
        assert_eq!((spans.next(), &server["kind"]), (None, &json!("SPAN_KIND_SERVER")));
        (server, client)
    }
}

/// The numbers of spans that were sent, and dropped, as the operator reads them at `admin`.
async fn counted(admin: &str) -> (u64, u64) {
    let text = send(http().get(format!("{admin}/metrics"))).await.text;
    let number = |name: &str| {
        let name = format!("openclaw_proxy_trace_spans_{name}_total ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or_else(|| panic!("no {name}"));
        line.parse::<f64>().unwrap() as u64
    };
    (number("sent"), number("dropped"))
}

/// An app that is told of its callers.
async fn telling(server: &TestServer) -> (App, Bridge) {
    let registration = json!({ "device_id": "d", "tools": tools(&["echo"]), "bridge_features": ["context"] });
    let app = App::register_with(server, registration).await;
    let bridge = app.connect().await;
    (app, bridge)
}

/// What an app is told as `meta` when a client calls with this `_meta`, if any; the call succeeds.
async fn meta_of(client: &McpClient, bridge: &mut Bridge, meta: Option<&str>) -> Option<Value> {
    let meta = meta.map_or(String::new(), |meta| format!(r#","_meta":{meta}"#));
    let request = client.request(format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"echo","arguments":{{}}{meta}}}}}"#
    ));
    let call = tokio::spawn(send(request));
    let frame = bridge.recv().await;
    bridge.answer(frame["request_id"].as_str().unwrap(), r#""ok":true,"content":"done""#).await;
    let reply = soon(call).await.unwrap();
    assert_eq!((reply.status, reply.tool_text().as_str()), (200, "done"));
    frame.get("meta").cloned()
}

#[tokio::test]
async fn the_trace_of_the_headers_reaches_the_app_where_meta_does_not_tell_it() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = telling(&server).await;
    let client = app.client();
    assert_eq!(meta_of(&client, &mut bridge, None).await, None);
    let client = client.header("traceparent", PARENT).header("tracestate", "a=1").header("tracestate", "b=2");
    let client = client.header("baggage", "user=x");
    let carried = json!({ "traceparent": PARENT, "tracestate": "a=1,b=2", "baggage": "user=x" });
    assert_eq!(meta_of(&client, &mut bridge, None).await, Some(carried.clone()));
    let mut with_more = carried;
    with_more["x"] = json!(1);
    assert_eq!(meta_of(&client, &mut bridge, Some(r#"{"x":1,"progressToken":1}"#)).await, Some(with_more));
    // A trace in _meta wins as a whole; baggage has nothing to do with it.
    let meta = json!({ "traceparent": OTHER });
    let both = json!({ "traceparent": OTHER, "baggage": "user=x" });
    assert_eq!(meta_of(&client, &mut bridge, Some(&meta.to_string())).await, Some(both));
    let meta = json!({ "traceparent": "malformed", "tracestate": 5, "baggage": null });
    assert_eq!(meta_of(&client, &mut bridge, Some(&meta.to_string())).await, Some(meta));
}

#[tokio::test]
async fn malformed_traces_in_headers_are_not_carried_and_harm_no_call() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = telling(&server).await;
    let long = "x".repeat(9000);
    for traceparent in ["", "x", &PARENT.to_uppercase(), &format!("{PARENT}-"), "00-0-0-01", "\u{e9}", &long] {
        let client =
            app.client().header("traceparent", traceparent).header("tracestate", "a=1").header("baggage", &long);
        assert_eq!(meta_of(&client, &mut bridge, None).await, None, "{traceparent}");
    }
    let twice = app.client().header("traceparent", PARENT).header("traceparent", OTHER);
    assert_eq!(meta_of(&twice, &mut bridge, None).await, None);
}

#[tokio::test]
async fn an_app_that_asked_for_nothing_is_told_nothing() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let client = app.client().header("traceparent", PARENT).header("baggage", "a=1");
    assert_eq!(meta_of(&client, &mut bridge, Some(&json!({ "traceparent": PARENT }).to_string())).await, None);
}

#[tokio::test]
async fn a_call_is_two_spans_between_those_of_its_client_and_its_app() {
    let mut collector = Collector::start().await;
    let settings = [
        ("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20for-the-collector"),
        ("OTEL_SERVICE_NAME", "the-proxy"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test"),
    ];
    let server = collector.server(&settings).await;
    let (app, mut bridge) = telling(&server).await;
    let meta = json!({ "traceparent": PARENT, "tracestate": "a=1", "x": 1 });
    let before = nanos();
    let told = meta_of(&app.client(), &mut bridge, Some(&meta.to_string())).await.unwrap();
    let request = collector.request().await;
    let after = nanos();
    assert_eq!((&request["path"], &request["is_known"]), (&json!("/v1/traces"), &json!(true)));
    assert_eq!(request["headers"]["content-type"], "application/x-protobuf");
    assert_eq!(request["headers"]["authorization"], "Bearer for-the-collector");
    let resource = &request["resource"];
    assert_eq!(
        (&resource["service.name"], &resource["deployment.environment.name"]),
        (&json!("the-proxy"), &json!("test"))
    );
    assert_eq!(request["scope"][0], "openclaw-mcp-proxy");
    let [of_call, of_app] = &request["spans"].as_array().unwrap()[..] else { panic!("{request}") };
    for (span, parent, name, kind) in [
        (of_call, &json!("b7ad6b7169203331"), "tools/call echo", "SPAN_KIND_SERVER"),
        (of_app, &of_call["span"], "invoke_tool echo", "SPAN_KIND_CLIENT"),
    ] {
        assert_eq!((&span["trace"], &span["parent"], &span["state"]), (&json!(TRACE), parent, &json!("a=1")));
        assert_eq!((&span["name"], &span["kind"], &span["is_error"]), (&json!(name), &json!(kind), &json!(false)));
    }
    let flags = [of_call, of_app].map(|span| span["flags"].as_u64().unwrap());
    assert_eq!(flags, [0x301, 0x101], "sampled; only the first one's parent is elsewhere");
    // The app's spans are children of the second one; the rest reaches it as it was.
    let traceparent = format!("00-{TRACE}-{}-01", of_app["span"].as_str().unwrap());
    assert_eq!(told, json!({ "traceparent": traceparent, "tracestate": "a=1", "x": 1 }));
    let times =
        [&of_call["start"], &of_app["start"], &of_app["end"], &of_call["end"]].map(|time| time.as_u64().unwrap());
    // The second one is the app's time alone.
    assert!(
        times.is_sorted_by(|one, next| one < next) && before <= times[0] && times[3] <= after,
        "{before} {times:?} {after}"
    );
    assert_eq!(
        of_call["attributes"],
        json!({
            "mcp.method.name": "tools/call", "mcp.protocol.version": "2025-03-26", "mcp.session.id": &app.id[..8],
            "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "echo", "network.protocol.name": "http",
            "network.transport": "tcp", "openclaw.tenant": "default", "http.response.status_code": 200,
        })
    );
    assert_eq!(
        of_app["attributes"],
        json!({ "mcp.session.id": &app.id[..8], "gen_ai.tool.name": "echo", "network.protocol.name": "websocket" })
    );
}

fn nanos() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    since.as_nanos().try_into().unwrap()
}

#[tokio::test]
async fn a_call_without_a_trace_begins_one_and_headers_count_as_the_last_resort() {
    let mut collector = Collector::start().await;
    let server = collector.server(&[]).await;
    let (app, mut bridge) = telling(&server).await;
    let plain = app.client();
    let by_header = plain.clone().header("traceparent", PARENT).header("tracestate", "a=1").header("baggage", "b=2");
    let malformed = json!({ "traceparent": "00-malformed", "tracestate": "lost=1", "x": 1 }).to_string();
    let other = json!({ "traceparent": OTHER }).to_string();
    for (client, meta, parent, keeps) in [
        (&plain, None, None, json!({})),
        (&plain, Some(&malformed), None, json!({ "x": 1 })),
        (&by_header, Some(&malformed), None, json!({ "x": 1, "baggage": "b=2" })),
        (&by_header, None, Some(PARENT), json!({ "tracestate": "a=1", "baggage": "b=2" })),
        (&by_header, Some(&other), Some(OTHER), json!({ "baggage": "b=2" })),
    ] {
        let mut told = meta_of(client, &mut bridge, meta.map(String::as_str)).await.unwrap();
        let (of_call, of_app) = collector.spans().await;
        let (trace, span) = (of_call["trace"].as_str().unwrap(), of_app.unwrap()["span"].take());
        assert_eq!(told["traceparent"], format!("00-{trace}-{}-01", span.as_str().unwrap()));
        // The HTTP request's own span is not lost where _meta names another.
        let beside = [&PARENT[3..35], &PARENT[36..52]];
        let is_beside = !client.headers.is_empty() && meta.is_some();
        assert_eq!(of_call["links"], if is_beside { json!([beside]) } else { json!([]) });
        assert_eq!(of_call["parent"], parent.map_or("", |parent| &parent[36..52]));
        assert!(parent.is_none_or(|parent| trace == &parent[3..35]), "{trace}");
        told.as_object_mut().unwrap().remove("traceparent");
        assert_eq!(told, keeps);
    }
}

#[tokio::test]
async fn what_is_not_kept_is_passed_on_as_it_came_and_not_exported() {
    let unkept = PARENT.replace("-01", "-00");
    let meta = json!({ "traceparent": unkept, "tracestate": "a=1" });
    let ratio = ("OTEL_TRACES_SAMPLER_ARG", "0");
    for (settings, theirs, is_kept) in [
        (&[][..], Some(&meta), false),
        (&[("OTEL_TRACES_SAMPLER", "always_on")], Some(&meta), true),
        (&[("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ratio], Some(&json!({ "traceparent": PARENT })), true),
        (&[("OTEL_TRACES_SAMPLER", "traceidratio"), ratio], Some(&json!({ "traceparent": PARENT })), false),
        (&[("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), ratio], None, false),
    ] {
        let mut collector = Collector::start().await;
        let server = collector.server(settings).await;
        let (app, mut bridge) = telling(&server).await;
        let told = meta_of(&app.client(), &mut bridge, theirs.map(Value::to_string).as_deref()).await.unwrap();
        let told_parent = told["traceparent"].as_str().unwrap();
        if is_kept {
            let (_, of_app) = collector.spans().await;
            assert_eq!(told_parent, format!("00-{TRACE}-{}-01", of_app.unwrap()["span"].as_str().unwrap()));
        } else if let Some(theirs) = theirs {
            assert_eq!(told, *theirs);
        } else {
            // Whoever the app calls does not begin a trace of its own either.
            assert!(told_parent.len() == 55 && told_parent.ends_with("-00"), "{told_parent}");
        }
        server.stopped().await;
        assert_eq!(collector.left().await, 0);
    }
}

#[tokio::test]
async fn what_failed_says_how() {
    let mut collector = Collector::start().await;
    let server = collector.server(&[("MAX_CALLS_PER_TENANT", "1"), ("TOOL_TIMEOUT_SECONDS", "1")]).await;
    let app = App::register(&server).await;
    let client = app.client();
    let wrong = async |collector: &mut Collector| {
        let (of_call, of_app) = collector.spans().await;
        let of = |span: &Value| {
            assert_eq!(span["is_error"], true, "{span}");
            let attributes = &span["attributes"];
            (attributes["error.type"].as_str().unwrap().to_owned(), attributes["rpc.response.status_code"].clone())
        };
        let status = of_call["attributes"]["http.response.status_code"].as_u64();
        assert!(of_app.as_ref().is_none_or(|of_app| of(of_app) == of(&of_call)));
        let (kind, code) = of(&of_call);
        (kind, status, of_app.is_some(), code)
    };
    client.call("echo", "{}").await;
    assert_eq!(wrong(&mut collector).await, ("not_connected".into(), Some(200), false, Value::Null));
    let mut bridge = app.connect().await;
    let call = client.spawn_call("1", "echo", "{}");
    let (id, _, _) = bridge.invoked().await;
    assert_eq!(client.call("echo", "{}").await.status, 429);
    assert_eq!(wrong(&mut collector).await, ("429".into(), Some(429), false, json!("429")));
    bridge.answer(&id, r#""ok":false,"error":"canary""#).await;
    soon(call).await.unwrap();
    assert_eq!(wrong(&mut collector).await, ("tool_error".into(), Some(200), true, Value::Null));
    let call = client.spawn_call("1", "echo", "{}");
    bridge.answer_next(r#""ok":false,"error":{"code":7,"message":"canary"}"#).await;
    soon(call).await.unwrap();
    assert_eq!(wrong(&mut collector).await, ("7".into(), Some(200), true, json!("7")));
    let call = client.spawn_call("1", "echo", "{}");
    bridge.invoked().await;
    soon(call).await.unwrap();
    assert_eq!(wrong(&mut collector).await, ("timeout".into(), Some(200), true, Value::Null));
    let call = client.spawn_call("1", "echo", "{}");
    bridge.invoked().await;
    call.abort();
    assert_eq!(wrong(&mut collector).await, ("client_gone".into(), None, true, Value::Null));
    // What is no call has no span: the next one is of the next call.
    client.call("unknown", "{}").await;
    client.rpc("1", "tools/list", "{}").await;
    let call = client.spawn_call("1", "slow", "{}");
    bridge.answer_next(r#""ok":true"#).await;
    soon(call).await.unwrap();
    assert_eq!(collector.spans().await.0["name"], "tools/call slow");
}

#[tokio::test]
async fn nothing_of_what_calls_contain_and_no_secret_is_exported() {
    let mut collector = Collector::start().await;
    let tokens = [("APP_TOKEN", "canary-app-token"), ("OPENCLAW_TOKEN", "canary-claw-token")];
    let secret = [("OTEL_EXPORTER_OTLP_HEADERS", "authorization=canary-collector")];
    let server = collector.server(&[&tokens[..], &secret].concat()).await;
    let registration = json!({
        "device_id": "canary-device", "tools": [{ "name": "echo", "description": "canary" }], "bridge_features": ["context"],
    });
    let app = App::register_as(&server, registration, "canary-app-token").await;
    let mut bridge = app.connect().await;
    let client = app.client().header("authorization", "Bearer canary-claw-token").header("baggage", "canary=1");
    for answer in [
        r#""ok":true,"content":{"canary":1}"#,
        r#""ok":false,"error":"canary""#,
        r#""ok":false,"error":{"code":7,"message":"canary","data":"canary"}"#,
        r#""ok":true,"result":{"content":"canary"}"#,
    ] {
        let params = r#"{"name":"echo","arguments":{"canary":"canary"},"_meta":{"canary":1,"progressToken":"canary"}}"#;
        let body = format!(r#"{{"jsonrpc":"2.0","id":"canary","method":"tools/call","params":{params}}}"#);
        let call = tokio::spawn(send(client.request(body)));
        bridge.answer_next(answer).await;
        soon(call).await.unwrap();
        let request = collector.request().await;
        let body = STANDARD.decode(request["body"].as_str().unwrap()).unwrap();
        let body = String::from_utf8_lossy(&body);
        assert!(body.contains("tools/call echo") && body.contains(&app.id[..8]));
        assert!(!body.contains("canary") && !body.contains(&app.id), "{body}");
    }
}

#[tokio::test]
async fn calls_go_on_while_no_collector_is_there_and_lost_spans_are_counted_and_told_once() {
    let endpoint = format!("http://127.0.0.1:{}", free_port().await);
    let settings = [
        ("LISTEN", "127.0.0.1:0"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &*endpoint),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=canary"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0"),
        ("ADMIN_LISTEN", "127.0.0.1:0"),
    ];
    let mut child = program(&settings).spawn().unwrap();
    let mut log = Log::of(&mut child);
    let listening = async |log: &mut Log, name: &str| {
        let line = log.until(name).await;
        line.split_once(name).unwrap().1.split(' ').next().unwrap().to_owned()
    };
    let base = listening(&mut log, "url=").await;
    let admin = listening(&mut log, "admin=").await;
    let app = App::register_at(&base, json!({ "device_id": "d", "tools": tools(&["echo"]) })).await;
    app.connect().await.echo();
    for _ in 0..20 {
        assert_eq!(app.client().call("echo", "{}").await.status, 200);
    }
    until(async || counted(&admin).await == (0, 40)).await;
    let pid = child.id().unwrap().to_string();
    assert!(std::process::Command::new("kill").arg(&pid).status().unwrap().success());
    assert!(soon(child.wait()).await.unwrap().success());
    log.until("shutting down").await;
    assert_eq!(log.seen.matches("spans cannot be sent").count(), 1, "{}", log.seen);
    assert!(log.seen.contains(endpoint.trim_start_matches("http://")) && !log.seen.contains("canary"), "{}", log.seen);
}

#[tokio::test]
async fn a_collector_that_hangs_costs_no_call_no_memory_and_no_stop() {
    let hanging = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", hanging.local_addr().unwrap());
    let settings = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &*endpoint),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "10"),
        ("ADMIN_LISTEN", "127.0.0.1:0"),
    ];
    let server = TestServer::start(&settings).await;
    let app = App::register(&server).await;
    app.connect().await.echo();
    assert_eq!(app.client().call("echo", "{}").await.status, 200);
    // It has the first call, and says nothing.
    let _connection = soon(hanging.accept()).await.unwrap();
    for _ in 0..20 {
        assert_eq!(app.client().call("echo", "{}").await.status, 200);
    }
    // Five calls wait, the others are lost.
    assert_eq!(counted(server.admin.as_ref().unwrap()).await, (0, 30));
    let (_, time) = timed(server.stopped()).await;
    assert!(time < PATIENCE / 2, "{time:?}");
}

#[tokio::test]
async fn the_last_spans_are_sent_when_the_proxy_stops() {
    let mut collector = Collector::start().await;
    let server =
        collector.server(&[("OTEL_BSP_SCHEDULE_DELAY", "3600000"), ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    for _ in 0..2 {
        let call = app.client().spawn_call("1", "echo", "{}");
        bridge.answer_next(r#""ok":true"#).await;
        soon(call).await.unwrap();
    }
    // Enough of them do not wait, and the rest waits for the end: the last one's answer is the proxy's last deed.
    assert_eq!(collector.request().await["spans"].as_array().unwrap().len(), 4);
    let last = app.client().spawn_call("1", "slow", "{}");
    let (id, _, _) = bridge.invoked().await;
    server.begin_stop();
    bridge.answer(&id, r#""ok":true"#).await;
    soon(last).await.unwrap();
    server.stopped().await;
    assert_eq!(collector.spans().await.0["name"], "tools/call slow");
}

#[tokio::test]
async fn spans_that_the_collector_refuses_are_counted_as_lost() {
    let mut collector = Collector::refusing(1).await;
    let server = collector.server(&[("ADMIN_LISTEN", "127.0.0.1:0")]).await;
    let app = App::register(&server).await;
    app.connect().await.echo();
    app.client().call("echo", "{}").await;
    collector.request().await;
    until(async || counted(server.admin.as_ref().unwrap()).await == (1, 1)).await;
}

#[tokio::test]
async fn check_config_knows_the_variables_of_opentelemetry() {
    let check = async |settings: &[(&str, &str)]| {
        let mut command = program_by(Command::new(PROGRAM), &[&[("LISTEN", "127.0.0.1:0")], settings].concat());
        let output = soon(command.arg("check-config").output()).await.unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    let on = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318");
    let settings = [
        on,
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=canary"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
        ("OTEL_METRICS_EXPORTER", "none"),
    ];
    let (code, stdout) = check(&settings).await;
    assert_eq!(code, 0, "{stdout}");
    for line in [
        "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318",
        "OTEL_EXPORTER_OTLP_HEADERS=(set)",
        "warning: OTEL_EXPORTER_OTLP_COMPRESSION is set and does nothing here; .env.example has what does.",
    ] {
        assert!(stdout.lines().any(|shown| shown == line), "{line}: {stdout}");
    }
    assert!(!stdout.contains("canary") && !stdout.contains("METRICS"), "{stdout}");
    let (code, stdout) = check(&[on, ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]).await;
    assert!(code == 78 && stdout.contains("problem: OTEL_EXPORTER_OTLP_PROTOCOL is grpc"), "{stdout}");
    let (code, stdout) = check(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:canary@host")]).await;
    assert!(code == 78 && !stdout.contains("canary"), "{stdout}");
}
