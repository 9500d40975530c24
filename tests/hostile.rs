//! Strangers, broken clients and apps gone bad: what they send is refused with a word that fits, costs little, and
//! hurts nobody else. Requests that servers read differently are in `front.rs`, bounds in `limits.rs`.

use std::process::{Child, Stdio};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;

use crate::program::{PROGRAM, program_by, serve};
use crate::support::{App, Bridge, McpClient, TestServer, http, send, soon, timed, tools, until};

fn path(app: &App) -> &str {
    app.bridge_url.splitn(4, '/').nth(3).unwrap()
}

/// The opening handshake of an app's bridge.
fn handshake(app: &App) -> String {
    let token = &app.token;
    format!(
        "GET /{} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        path(app)
    )
}

/// A bridge that is a bare socket.
async fn bare_bridge(port: u16, app: &App) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.write_all(handshake(app).as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(soon(stream.read_u8()).await.unwrap());
    }
    assert!(answer.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&answer));
    stream
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn four_thousand_idle_bridges_take_less_than_15_kb_each() {
    const BRIDGES: usize = 4000;
    let enough = BRIDGES + 500;
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next()).unwrap();
    assert!(
        files == "unlimited" || files.parse::<usize>().unwrap() >= enough,
        "this test opens {enough} files, and may open {files}: run 'ulimit -n {enough}' before"
    );
    let mut command = tokio::process::Command::new("/bin/sh");
    command.args(["-c", &format!("ulimit -n {enough} && exec \"$0\""), PROGRAM]);
    let settings = [("LISTEN", "127.0.0.1:0"), ("MAX_SESSIONS_PER_TENANT", "4000"), ("PING_SECONDS", "300")];
    let (child, base) = serve(program_by(command, &settings)).await;
    let port = base.rsplit(':').next().unwrap().parse().unwrap();
    let rss = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id().unwrap())).unwrap();
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()).unwrap();
        kib.parse::<usize>().unwrap() * 1024
    };
    let create = http();
    let mut apps = Vec::new();
    for _ in 0..BRIDGES {
        let registration = json!({ "device_id": "d", "tools": tools(&["echo"]) });
        let reply = send(create.post(format!("{base}/v1/chat/sessions")).json(&registration)).await.json();
        let text = |name: &str| reply[name].as_str().unwrap().to_owned();
        apps.push(App {
            id: text("mcpSessionId"),
            bridge_url: text("bridge_url"),
            mcp_url: text("mcp_url"),
            token: String::new(),
            registration: Value::Null,
        });
    }
    let before = rss();
    let mut bridges = Vec::new();
    for app in &apps {
        bridges.push(bare_bridge(port, app).await);
    }
    apps[BRIDGES - 1].wait_connected(true).await;
    let each = rss().saturating_sub(before) / BRIDGES;
    eprintln!("{each} bytes a bridge; {} before, {} after", before, rss());
    assert!(each < 15_000, "{each} bytes a bridge");
}

#[tokio::test]
async fn hundreds_of_slow_senders_end_and_others_are_served_meanwhile() {
    const EACH: usize = 150;
    let settings = [("HEADER_TIMEOUT_SECONDS", "1"), ("BODY_IDLE_SECONDS", "1"), ("BODY_TIMEOUT_SECONDS", "2")];
    let server = TestServer::start(&settings).await;
    let app = App::register(&server).await;
    app.connect().await.echo();
    let head = "POST /v1/chat/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    let body = format!("{head}Content-Length: 1000\r\n\r\n{{");
    let chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n");
    let mut slow = Vec::new();
    // All of them go on to send a little now and then: more of a header's name, of a body, another chunk of it.
    for (start, more) in [(head, "X"), (&body, " "), (&chunked, "1\r\n \r\n")] {
        for _ in 0..EACH {
            let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
            stream.write_all(start.as_bytes()).await.unwrap();
            slow.push((stream, more));
        }
    }
    let dripping = tokio::spawn(async move {
        let mut answers = Vec::new();
        for (mut stream, more) in slow {
            answers.push(tokio::spawn(async move {
                let (mut reader, mut writer) = stream.split();
                let drip = async {
                    while writer.write_all(more.as_bytes()).await.is_ok() {
                        tokio::time::sleep(Duration::from_millis(200)).await;
                    }
                };
                let mut answer = Vec::new();
                let _reset = tokio::select! {
                    read = reader.read_to_end(&mut answer) => read.map(|_| ()),
                    () = drip => Ok(()),
                };
                String::from_utf8_lossy(&answer).into_owned()
            }));
        }
        let mut ended = 0;
        for answer in answers {
            let answer = answer.await.unwrap();
            assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
            ended += 1;
        }
        ended
    });
    let reply = app.client().call("echo", r#"{"a":1}"#).await;
    assert_eq!(reply.json()["result"]["structuredContent"], json!({ "a": 1 }));
    let (ended, took) = timed(soon(dripping)).await;
    assert_eq!(ended.unwrap(), 3 * EACH);
    assert!(took < Duration::from_secs(10), "{took:?}");
}

/// What stands where an id is expected, and is none.
fn odd_ids(real: &str) -> Vec<String> {
    let mut ids: Vec<String> = [
        "%2f",
        "a%2fb",
        "%2F%2F",
        "%00",
        "%0d%0aX:%20y",
        "..",
        "%2e%2e",
        "..%2f..%2fhealth",
        "%",
        "%zz",
        "%ff%fe",
        "${ID}",
        "$%7BID%7D",
        "'",
        "\"",
        "<script>",
        "\u{fc}",
        "\u{1f600}",
        "\u{202e}",
        "*",
        "?",
        "0",
        "-1",
        "null",
        "undefined",
        "[object%20Object]",
    ]
    .map(str::to_owned)
    .to_vec();
    ids.extend([
        real.to_uppercase(),
        format!("{real}%00"),
        format!("{real}%20"),
        format!("{real}/../{real}"),
        format!("%{:02x}{}", real.as_bytes()[0], &real[1..]),
        real[..31].to_owned(),
        format!("{real}0"),
        "0".repeat(20_000),
        "0".repeat(1 << 20),
    ]);
    ids
}

#[tokio::test]
async fn whatever_stands_for_an_id_is_unknown_and_breaks_nothing() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    app.connect().await.echo();
    let status = async |request: String| {
        let answer = server.raw(request.as_bytes(), Duration::from_secs(5)).await;
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{:.200}: {answer}", request);
        assert!(answer.len() < 1024, "{request:.200}: an answer of {} bytes", answer.len());
        answer.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    let common = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n";
    let list = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    let refused = [400, 404, 414, 431];
    for id in odd_ids(&app.id) {
        for (method, path, body) in [
            ("POST", format!("/v1/mcp/{id}"), list),
            ("GET", format!("/v1/chat/sessions/{id}"), ""),
            ("PUT", format!("/v1/chat/sessions/{id}/tools"), r#"{"tools":[]}"#),
            ("DELETE", format!("/v1/chat/sessions/{id}"), ""),
        ] {
            let length = body.len();
            let request = format!("{method} {path} HTTP/1.1\r\n{common}Content-Length: {length}\r\n\r\n{body}");
            let status = status(request).await;
            // To say goodbye to what is not there is no error.
            let is_goodbye = method == "DELETE" && status == 200;
            // `?` ends the path, so this is the path without an id.
            let is_elsewhere = id == "?" && matches!(status, 400 | 404 | 405);
            assert!(refused.contains(&status) || is_goodbye || is_elsewhere, "{method} {id:.60}: {status}");
        }
        // In a header, which cannot hold everything.
        if !id.contains("%0d") {
            for header in ["MCP-Session-Id", "X-OpenClaw-Session-Id"] {
                let length = list.len();
                let request = format!(
                    "POST /v1/mcp HTTP/1.1\r\n{common}{header}: {id}\r\nContent-Length: {length}\r\n\r\n{list}"
                );
                let status = status(request).await;
                assert!(refused.contains(&status), "{header}: {id:.60}: {status}");
            }
        }
        // As a bridge: a code, or a status where there can be no upgrade.
        let request = handshake(&app).replace(&app.id, &id);
        let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
        let _reset = stream.write_all(request.as_bytes()).await;
        let mut answer = [0; 4096];
        let read = soon(stream.read(&mut answer)).await.unwrap();
        let mut answer = answer[..read].to_vec();
        if answer.starts_with(b"HTTP/1.1 101") {
            let code = 4404_u16.to_be_bytes();
            soon(async {
                while !answer.windows(2).any(|pair| pair == code) {
                    let mut more = [0; 512];
                    let read = stream.read(&mut more).await.unwrap();
                    assert!(read > 0, "{id:.60}");
                    answer.extend_from_slice(&more[..read]);
                }
            })
            .await;
        } else {
            let status: u16 = String::from_utf8_lossy(&answer).split(' ').nth(1).unwrap().parse().unwrap();
            assert!(refused.contains(&status), "bridge of {id:.60}: {status}");
        }
    }
    assert!(!app.client().call("echo", "{}").await.is_tool_error(), "the session is unhurt");
}

#[tokio::test]
async fn arrays_are_no_objects_anywhere() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["echo"]), "bridge_features": ["cancel", "tools"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    // As requests: members of a batch, each of them refused.
    for body in [r#"[1,["echo",{}]]"#, r#"[["2.0",1,"ping",null]]"#] {
        let answers = app.client().post(body).await.json();
        let answers = answers.as_array().unwrap_or_else(|| panic!("{answers}"));
        assert!(answers.iter().all(|answer| answer["error"]["code"] == -32600), "{answers:?}");
    }
    for (params, code) in [(r#"["echo",{}]"#, -32602), (r#"[["echo"],{}]"#, -32602)] {
        assert_eq!(app.client().rpc("1", "tools/call", params).await.json()["error"]["code"], code, "{params}");
    }
    let post = async |body: &str| {
        let request = http().post(format!("{}/v1/chat/sessions", server.base));
        send(request.header("content-type", "application/json").body(body.to_owned())).await.status
    };
    for body in [r#"["d",null,null,[]]"#, r#"{"device_id":["d"]}"#, r#"{"device_id":"d","tools":[["echo","A tool."]]}"#]
    {
        assert_eq!(post(body).await, 422, "{body}");
    }
    let put = http().put(format!("{}/tools", app.session_url())).header("content-type", "application/json");
    assert_eq!(send(put.body("[[]]")).await.status, 422);
    // As frames: a result that is none ends no call.
    let call = app.client().spawn_call("1", "echo", "{}");
    let (id, _, _) = bridge.invoked().await;
    for frame in [json!(["invoke_result", app.id, 1, true, "forged"]), json!(["update_tools", []]), json!(["pong"])] {
        bridge.send(frame.clone()).await;
        assert_eq!(bridge.recv().await["type"], "error", "{frame}");
    }
    bridge.answer(&id, r#""ok":true,"content":"honest""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "honest");
}

#[tokio::test]
async fn invalid_utf_8_is_refused_even_where_nobody_reads() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    app.connect().await.echo();
    let with = |text: &str| text.as_bytes().iter().map(|b| if *b == b'#' { 0xff } else { *b }).collect::<Vec<u8>>();
    for body in [
        r##"{"jsonrpc":"2.0","id":1,"method":"ping","ignored":"#"}"##,
        r##"{"jsonrpc":"2.0","id":1,"method":"ping","params":{"ignored":{"#":1}}}"##,
        r##"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{"x":"#"}}}"##,
        r##"{"jsonrpc":"2.0","id":1,"method":"ping"}#"##,
    ] {
        let reply = send(app.client().request("").body(with(body))).await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &json!(-32700)), "{body}");
    }
    for body in [r##"{"device_id":"d","ignored":"#"}"##, r##"{"device_id":"d","tools":[{"name":"a","ignored":"#"}]}"##]
    {
        let request = http().post(format!("{}/v1/chat/sessions", server.base));
        let reply = send(request.header("content-type", "application/json").body(with(body))).await;
        assert_eq!(reply.status, 400, "{body}");
    }
    // A WebSocket may carry none in text (RFC 6455, section 8.1).
    for text in [r##"{"type":"pong","ignored":"#"}"##, "#"] {
        assert_eq!(close_code(&server, &frame(0x81, &with(text))).await, Some(1007), "{text}");
    }
}

/// A frame as a client sends it.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match payload.len() {
        length @ ..126 => frame.push(0x80 | length as u8),
        length @ ..65536 => {
            frame.push(0x80 | 126);
            frame.extend_from_slice(&(length as u16).to_be_bytes());
        }
        length => {
            frame.push(0x80 | 127);
            frame.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
    frame.extend_from_slice(&[0; 4]);
    frame.extend_from_slice(payload);
    frame
}

/// The next frame from the proxy, all of whose frames here are short: its first byte and its payload. `None` at the end.
async fn received(reader: &mut (impl AsyncRead + Unpin)) -> Option<(u8, Vec<u8>)> {
    let first = reader.read_u8().await.ok()?;
    let length = match reader.read_u8().await.ok()? {
        126 => reader.read_u16().await.ok()?,
        length @ ..126 => length.into(),
        length => panic!("a frame with {length} for its length"),
    };
    let mut payload = vec![0; length.into()];
    reader.read_exact(&mut payload).await.ok()?;
    Some((first, payload))
}

/// The code with which a bridge is closed on which these bytes come; `None` if the connection ends without one.
async fn close_code(server: &TestServer, bytes: &[u8]) -> Option<u16> {
    let app = App::register(server).await;
    let stream = bare_bridge(server.port, &app).await;
    let (mut reader, mut writer) = stream.into_split();
    let bytes = bytes.to_vec();
    let writing = tokio::spawn(async move {
        let _reset = writer.write_all(&bytes).await;
        writer
    });
    let code = soon(async {
        loop {
            let (first, payload) = received(&mut reader).await?;
            if first == 0x88 {
                return payload.first_chunk().map(|code| u16::from_be_bytes(*code));
            }
        }
    })
    .await;
    writing.abort();
    app.wait_connected(false).await;
    code
}

#[tokio::test]
async fn frames_that_break_the_protocol_close_their_bridge_with_the_code_that_says_so() {
    let server = TestServer::start(&[]).await;
    let unmasked = [0x81, 2, b'{', b'}'];
    let announced = |first: u8, length: u64| {
        let mut frame = vec![first, 0x80 | 127];
        frame.extend_from_slice(&length.to_be_bytes());
        frame.extend_from_slice(&[0; 4]);
        frame
    };
    const LIMIT: u64 = 32 * 1024 * 1024;
    let half = frame(0x01, &vec![b' '; 20 * 1024 * 1024]);
    let other_half = frame(0x80, &vec![b' '; 20 * 1024 * 1024]);
    for (case, bytes, code) in [
        ("not masked", unmasked.to_vec(), 1002),
        ("a control frame of 126 bytes", frame(0x89, &[0; 126]), 1002),
        ("a control frame in pieces", frame(0x09, b"x"), 1002),
        ("a reserved kind of frame", frame(0x83, b"x"), 1002),
        ("a reserved kind of control frame", frame(0x8b, b"x"), 1002),
        ("a reserved bit", frame(0xc1, b"{}"), 1002),
        ("a piece of nothing", frame(0x80, b"x"), 1002),
        ("a new message within another", [frame(0x01, b"{"), frame(0x81, b"{}")].concat(), 1002),
        ("a close frame of one byte", frame(0x88, b"x"), 1002),
        ("a message that announces too much", announced(0x81, LIMIT + 1), 1009),
        ("a message that announces more than there is", announced(0x82, u64::MAX >> 1), 1009),
        ("pieces that are too much together", [half, other_half].concat(), 1009),
    ] {
        assert_eq!(close_code(&server, &bytes).await, Some(code), "{case}");
    }
    // On the other side of the limit.
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let call = app.client().spawn_call("1", "echo", "{}");
    let (id, _, _) = bridge.invoked().await;
    let start = format!(r#"{{"type":"invoke_result","mcpSessionId":"{}","request_id":"{id}","ok":true"#, app.id);
    let rest = LIMIT as usize - start.len() - 1;
    bridge.send_text(format!("{start}{}}}", " ".repeat(rest))).await;
    assert!(!call.await.unwrap().is_tool_error());
}

#[tokio::test]
async fn floods_of_control_frames_and_tiny_pieces_do_no_harm() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let stream = bare_bridge(server.port, &app).await;
    let (reader, mut writer) = stream.into_split();
    let reading = tokio::spawn(async move {
        let mut reader = BufReader::new(reader);
        let (mut pongs, mut is_last_answered, mut is_called) = (0, false, false);
        while !is_last_answered || !is_called {
            match received(&mut reader).await {
                Some((0x8a, payload)) => {
                    pongs += 1;
                    is_last_answered = payload == b"last";
                }
                Some((0x81, text)) => is_called |= String::from_utf8(text).unwrap().contains("invoke_tool"),
                // A ping of the proxy's own.
                Some((0x89, _)) => {}
                other => panic!("the bridge is gone: {other:?}"),
            }
        }
        pongs
    });
    // Ten thousand pings, with a message in 2,000 pieces among them.
    let mut bytes = frame(0x89, b"p").repeat(5000);
    bytes.extend(frame(0x01, b"{"));
    bytes.extend([frame(0x00, b" "), frame(0x89, b"p"), frame(0x00, b"")].concat().repeat(1000));
    bytes.extend(frame(0x80, br#""type":"pong"}"#));
    bytes.extend(frame(0x89, b"p").repeat(3999));
    bytes.extend(frame(0x89, b"last"));
    soon(writer.write_all(&bytes)).await.unwrap();
    let call = app.client().spawn_call("1", "echo", "{}");
    let pongs = soon(reading).await.unwrap();
    assert!(pongs <= 10_000, "{pongs} pongs");
    let result = format!(r#"{{"type":"invoke_result","mcpSessionId":"{0}","request_id":"{0}:1","ok":true}}"#, app.id);
    writer.write_all(&frame(0x81, result.as_bytes())).await.unwrap();
    assert!(!call.await.unwrap().is_tool_error());
}

#[tokio::test]
async fn a_flood_of_pings_whose_answers_nobody_reads_ends_its_bridge() {
    // Not by these clocks, which would let it go on for a while.
    let server = TestServer::start(&[("WRITE_STALL_SECONDS", "600"), ("PING_SECONDS", "600")]).await;
    let app = App::register(&server).await;
    // The kernel keeps little of the answers for a client with a small buffer.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(([127, 0, 0, 1], server.port).into()).await.unwrap();
    stream.write_all(handshake(&app).as_bytes()).await.unwrap();
    app.wait_connected(true).await;
    let flood = tokio::spawn(async move {
        let pings = frame(0x89, &[0; 125]).repeat(1000);
        // Much more than the kernel keeps; not more than memory can hold, should nothing end it.
        for _ in 0..1000 {
            if stream.write_all(&pings).await.is_err() {
                break;
            }
        }
        stream
    });
    app.wait_connected(false).await;
    soon(flood).await.unwrap();
}

#[tokio::test]
async fn depth_and_numbers_that_break_parsers_stop_here_in_both_directions() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let open = "[".repeat(100_000);
    let objects = format!("{}1{}", r#"{"a":"#.repeat(50_000), "}".repeat(50_000));
    let digits = "9".repeat(400);
    for value in [
        &deep,
        &open,
        &objects,
        "1e400",
        "-1e400",
        &digits,
        "1e99999999999999999999",
        r#""\ud800""#,
        r#""\udc00""#,
        r#""\udc00\ud800""#,
    ] {
        let reply = app.client().call("echo", &format!(r#"{{"x":{value}}}"#)).await;
        assert_eq!(reply.status, 400, "{value:.20}");
        assert!(matches!(reply.json()["error"]["code"].as_i64(), Some(-32600 | -32700)), "{}", reply.text);
        let body = format!(r#"{{"device_id":"d","x":{value}}}"#);
        let request = http().post(format!("{}/v1/chat/sessions", server.base));
        let reply = send(request.header("content-type", "application/json").body(body)).await;
        assert_eq!(reply.status, 400, "{value:.20}");
        // A call fails, and the bridge stays.
        let call = app.client().spawn_call("1", "echo", "{}");
        bridge.answer_next(&format!(r#""ok":true,"content":{value}"#)).await;
        assert!(call.await.unwrap().is_tool_error(), "{value:.20}");
    }
    let call = app.client().spawn_call("1", "echo", r#"{"n":1e308,"tiny":1e-400}"#);
    bridge.answer_next(r#""ok":true,"content":{"n":-1e308}"#).await;
    assert!(!call.await.unwrap().is_tool_error());
    assert_eq!(app.status().await.json()["bridge"]["epoch"], 1);
}

#[tokio::test]
async fn members_given_twice_are_refused_where_two_readers_could_differ() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["echo"]), "bridge_features": ["cancel"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    for body in [
        r#"{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"ping","\u006dethod":"tools/list"}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo"},"params":{"name":"echo"}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"none","name":"echo"}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{},"arguments":{"x":1}}}"#,
    ] {
        let reply = app.client().post(body).await;
        assert!(matches!(reply.json()["error"]["code"].as_i64(), Some(-32600 | -32602)), "{body}: {}", reply.text);
    }
    let call = app.client().spawn_call("1", "echo", r#"{"x":1,"x":2}"#);
    let text = bridge.recv_text().await;
    assert!(text.contains(r#""arguments":{"x":1,"x":2}"#), "arguments are the app's affair: {text}");
    let id = format!("{}:1", app.id);
    // The call that a frame may mean ends, and says why.
    for (n, frame) in [
        format!(r#"{{"type":"pong","type":"invoke_result","request_id":"{id}","ok":true,"content":"forged"}}"#),
        format!(r#"{{"type":"invoke_result","request_id":"{id}","ok":false,"ok":true,"content":"forged"}}"#),
        format!(r#"{{"type":"invoke_result","request_id":"{id}","ok":true,"content":1,"content":"forged"}}"#),
    ]
    .into_iter()
    .enumerate()
    {
        let call = match n {
            0 => None,
            _ => {
                let call = app.client().spawn_call("1", "echo", "{}");
                bridge.invoked().await;
                Some(call)
            }
        };
        bridge.send_text(frame.replace(&id, &format!("{}:{}", app.id, n + 1))).await;
        let error = bridge.recv().await;
        assert!(error["message"].as_str().unwrap().contains("given twice"), "{error}");
        if let Some(call) = call {
            let reply = soon(call).await.unwrap();
            assert!(reply.is_tool_error() && reply.tool_text().contains("given twice"), "{}", reply.text);
        }
    }
    assert!(soon(call).await.unwrap().tool_text().contains("given twice"));
    // Which call is meant is not guessed; and what is the same twice means the same.
    let call = app.client().spawn_call("1", "echo", "{}");
    let (id, _, _) = bridge.invoked().await;
    bridge.send_text(format!(r#"{{"type":"invoke_result","request_id":"{id}","request_id":"x","ok":true}}"#)).await;
    assert_eq!(bridge.recv().await["type"], "error");
    bridge.answer(&id, &format!(r#""requestId":"{id}","ok":true,"content":"honest""#)).await;
    assert_eq!(soon(call).await.unwrap().tool_text(), "honest");
}

#[tokio::test]
async fn too_many_headers_and_doubled_ones_are_refused() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    let status = async |path: &str, headers: &str| {
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n{body}",
            body.len()
        );
        let answer = server.raw(request.as_bytes(), Duration::from_secs(5)).await;
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    let own = format!("/v1/mcp/{}", app.id);
    assert_eq!(status(&own, "X: y\r\n").await, "200");
    assert_eq!(status(&own, &format!("X: {}\r\n", "y".repeat(100 * 1024))).await, "431");
    assert_eq!(status(&own, &format!("{}: y\r\n", "X".repeat(100 * 1024))).await, "431");
    assert_eq!(status(&own, &"X: y\r\n".repeat(101)).await, "431");
    assert_eq!(status(&own, &"X: y\r\n".repeat(10_000)).await, "431");
    let other = "0123456789abcdef0123456789abcdef";
    let two = format!("MCP-Session-Id: {}\r\nMCP-Session-Id: {other}\r\n", app.id);
    assert_eq!(status("/v1/mcp", &two).await, "400");
    let two = format!("X-OpenClaw-Session-Id: {}\r\nX-OpenClaw-Session-Id: {other}\r\n", app.id);
    assert_eq!(status("/v1/mcp", &two).await, "400");
    for name in ["Authorization", "Origin", "Content-Type", "X-Session-Secret"] {
        let two = format!("{name}: http://localhost\r\n{name}: http://localhost\r\n");
        assert_eq!(status(&own, &two).await, "400", "{name}");
        assert_eq!(status("/v1/chat/sessions", &two).await, "400", "{name}");
    }
    let two = "MCP-Protocol-Version: 2025-06-18\r\nMCP-Protocol-Version: 2025-11-25\r\n";
    assert_eq!(status(&own, two).await, "400");
}

#[tokio::test]
async fn names_that_deceive_who_reads_them_are_refused_or_made_plain() {
    let server = TestServer::start(&[]).await;
    let register = async |registration: Value| {
        send(http().post(format!("{}/v1/chat/sessions", server.base)).json(&registration)).await
    };
    for odd in ["a\u{1b}[2Jb", "a\nb", "a\u{0}b", "a\u{7f}b", "a\u{85}b", "a\u{202e}b", "a\u{2066}b", "a\u{2028}b"] {
        for tool in [
            json!({ "name": odd }),
            json!({ "name": "a", "title": odd }),
            json!({ "name": "a", "annotations": { "title": odd } }),
        ] {
            let reply = register(json!({ "device_id": "d", "tools": [tool] })).await;
            assert_eq!(reply.status, 422, "{tool}");
            assert!(!reply.text.contains(|c: char| c.is_control() || c == '\u{202e}'), "{}", reply.text);
        }
        // A device's name is its owner's; clients see it without what nobody can see.
        let reply = register(json!({ "device_id": odd, "device_name": odd })).await.json();
        let client = McpClient::new(reply["mcp_url"].as_str().unwrap());
        let reply = client.rpc("1", "initialize", r#"{"protocolVersion":"2025-11-25","capabilities":{}}"#).await;
        let title = &reply.json()["result"]["serverInfo"]["title"];
        assert!(matches!(title.as_str(), Some("ab" | "a[2Jb")), "{title}");
    }
    // What people write does not suffer.
    for fine in [
        "\u{5de5}\u{5177}",
        "Mom\u{2019}s \u{1f469}\u{200d}\u{1f469}\u{200d}\u{1f467} Mac",
        "\u{645}\u{6cc}\u{200c}\u{62e}\u{648}\u{627}\u{647}\u{645}",
    ] {
        let tool = json!({ "name": "a", "title": fine, "description": "Two\nlines." });
        let reply = register(json!({ "device_id": "d", "device_name": fine, "tools": [tool] })).await;
        let client = McpClient::new(reply.json()["mcp_url"].as_str().unwrap());
        let reply = client.rpc("1", "initialize", r#"{"protocolVersion":"2025-11-25","capabilities":{}}"#).await;
        assert_eq!(reply.json()["result"]["serverInfo"]["title"], fine);
        assert_eq!(client.rpc("1", "tools/list", "{}").await.json()["result"]["tools"][0]["title"], fine);
    }
}

#[tokio::test]
async fn whoever_reads_slowly_delays_nobody() {
    let server = TestServer::start(&[("WRITE_STALL_SECONDS", "2")]).await;
    let (slow, calm) = (App::register(&server).await, App::register(&server).await);
    calm.connect().await.echo();
    let mut bridge = slow.connect().await;
    // Twenty clients that ask for 8 MB and take a few bytes.
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo"}}"#;
    let mut readers = Vec::new();
    for _ in 0..20 {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut stream = socket.connect(([127, 0, 0, 1], server.port).into()).await.unwrap();
        let head =
            format!("POST /v1/mcp/{} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n", slow.id);
        stream.write_all(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes()).await.unwrap();
        readers.push(stream);
    }
    let large = format!(r#""ok":true,"content":"{}""#, "x".repeat(8_000_000));
    for _ in 0..readers.len() {
        bridge.answer_next(&large).await;
    }
    for reader in &mut readers {
        assert_eq!(soon(reader.read_u8()).await.unwrap(), b'H');
    }
    for _ in 0..20 {
        let (reply, took) = timed(calm.client().call("echo", "{}")).await;
        assert!(!reply.is_tool_error() && took < Duration::from_secs(1), "{took:?}");
    }
    // Nor those who call the same app.
    let call = slow.client().spawn_call("1", "echo", "{}");
    bridge.answer_next(r#""ok":true,"content":"quick""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "quick");
}

/// The program with everything that it can log, and where it goes.
struct Logged {
    child: Child,
    base: String,
    folder: std::path::PathBuf,
}

impl Logged {
    async fn start(settings: &[(&str, &str)]) -> Self {
        let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("canary-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = |name: &str| std::fs::File::create(folder.join(name)).unwrap();
        let port = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let mut command = std::process::Command::new(PROGRAM);
        command.current_dir(&folder).env_clear().stdin(Stdio::null()).stdout(file("stdout")).stderr(file("stderr"));
        for (name, value) in settings {
            command.env(format!("OPENCLAW_PROXY_{name}"), value);
        }
        command.env("OPENCLAW_PROXY_LISTEN", format!("127.0.0.1:{port}"));
        command.env("OPENCLAW_PROXY_AUDIT_FILE", folder.join("audit")).env("OPENCLAW_PROXY_LOG", "trace");
        command.env("RUST_BACKTRACE", "full");
        let child = command.spawn().unwrap();
        let logged = Logged { child, base: format!("http://127.0.0.1:{port}"), folder };
        until(async || TcpStream::connect(("127.0.0.1", port)).await.is_ok()).await;
        logged
    }

    /// Everything that was written, after the end.
    fn ended(mut self) -> String {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        ["stdout", "stderr", "audit"].map(|name| std::fs::read_to_string(self.folder.join(name)).unwrap()).concat()
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let _ended = self.child.kill().and_then(|()| self.child.wait());
        let _left_behind = std::fs::remove_dir_all(&self.folder);
    }
}

#[tokio::test]
async fn no_log_shows_what_was_said_or_by_whom() {
    let (app_token, claw_token) = ("canary-app-token-0123", "canary-claw-token-0123");
    for format in ["human", "json"] {
        let settings = [
            ("APP_TOKEN", app_token),
            ("OPENCLAW_TOKEN", claw_token),
            ("LOG_FORMAT", format),
            ("STREAM_AFTER_SECONDS", "0.1"),
            ("TOOL_TIMEOUT_SECONDS", "1"),
            ("MAX_BODY_BYTES", "70000"),
            ("MAX_TOOLS_BYTES", "65536"),
        ];
        let logged = Logged::start(&settings).await;
        let base = &logged.base;
        let register = http().post(format!("{base}/v1/chat/sessions")).bearer_auth(app_token);
        let registration = json!({
            "device_id": "d\n2026-01-01 ERROR forged \u{1b}[2J\u{202e}", "app_version": "\r\nERROR forged",
            "chat_id": "canary-chat", "user_id": "canary-user", "instructions": "canary-instructions",
            "want_session_secret": true, "want_mcp_token": true,
            "bridge_features": ["cancel", "progress", "context", "tools"],
            "tools": [{
                "name": "echo", "description": "canary-description", "path": "canary-path",
                "input_schema": { "title": "canary-schema" },
            }],
        });
        let reply = send(register.json(&registration)).await.json();
        let text = |name: &str| reply[name].as_str().unwrap().to_owned();
        let (id, secret, mcp_token) = (text("mcpSessionId"), text("session_secret"), text("mcp_token"));
        let app = App {
            id: id.clone(),
            bridge_url: text("bridge_url"),
            mcp_url: text("mcp_url"),
            registration: reply.clone(),
            token: app_token.into(),
        };
        let session = |method: reqwest::Method, path: &str, token: &str| {
            let request = http().request(method, format!("{}{path}", app.session_url())).bearer_auth(token);
            request.header("x-session-secret", &secret).header("x-canary", "canary-header")
        };
        let (get, put, delete) = (reqwest::Method::GET, reqwest::Method::PUT, reqwest::Method::DELETE);

        // Those who are turned away, with whatever they brought.
        for token in ["canary-wrong-token", "canary app", claw_token] {
            assert_eq!(send(session(get.clone(), "?token=canary-query", token)).await.status, 401);
            let client = McpClient::new(&app.mcp_url).header("authorization", &format!("Bearer {token}x"));
            assert_eq!(client.call("echo", r#"{"canary-argument":1}"#).await.status, 401);
        }
        for body in [
            "canary-body",
            r#"{"canary-key":canary}"#,
            r#"{"device_id":"d","tools":[{"name":"canary-tool","x":}]}"#,
            r#"{"device_id":7,"canary":1e400}"#,
        ] {
            let create = http().post(format!("{base}/v1/chat/sessions")).bearer_auth(app_token);
            for request in [create, session(put.clone(), "/tools", app_token)] {
                let reply = send(request.header("content-type", "application/json").body(body)).await;
                assert!(matches!(reply.status, 400 | 422), "{body}: {}", reply.status);
            }
        }
        for head in [
            "GET /canary-path?canary HTTP/1.1\r\nHost: canary-host",
            "CANARY canary",
            "GET / HTTP/1.1\r\nHost: canary\r\nX: canary\0",
        ] {
            let mut stream = TcpStream::connect(base.strip_prefix("http://").unwrap()).await.unwrap();
            stream.write_all(format!("{head}\r\nConnection: close\r\n\r\n").as_bytes()).await.unwrap();
            let _reset = soon(stream.read_to_end(&mut Vec::new())).await;
        }

        // A bridge that comes as a browser's does.
        let encode = |text: &str| URL_SAFE_NO_PAD.encode(text);
        let (as_token, as_secret) = (encode(app_token), encode(&secret));
        let mut request = app.bridge_url.as_str().into_client_request().unwrap();
        let protocols = format!("openclaw-bridge, bearer.{as_token}, session-secret.{as_secret}");
        request.headers_mut().insert("sec-websocket-protocol", protocols.parse().unwrap());
        let (socket, _) = soon(tokio_tungstenite::connect_async(request)).await.unwrap();
        let mut bridge = Bridge { id: id.clone(), socket };

        // Calls of every outcome.
        let client = McpClient::new(&app.mcp_url).header("authorization", &format!("Bearer {mcp_token}"));
        let arguments = r#"{"x":"canary-argument"}"#;
        let meta = r#"{"progressToken":"canary-progress","x":"canary-meta"}"#;
        let params = format!(r#"{{"name":"echo","arguments":{arguments},"_meta":{meta}}}"#);
        for answer in [
            r#""ok":true,"content":"canary-result""#,
            r#""ok":true,"content":{"canary-result":1e400}"#,
            r#""ok":false,"error":"canary-error""#,
            r#""ok":false,"error":{"code":-32001,"message":"canary-error","data":"canary-data"}"#,
            r#""result":{"content":[{"type":"canary-type"}]}"#,
            r#""ok":"canary-ok""#,
        ] {
            let call = tokio::spawn({
                let (client, params) = (client.clone(), params.clone());
                async move { client.rpc("\"canary-id\"", "tools/call", &params).await }
            });
            // What was wrong with the last answer is told in between.
            let request_id = loop {
                let frame = bridge.recv().await;
                if frame["type"] == "invoke_tool" {
                    break frame["request_id"].as_str().unwrap().to_owned();
                }
            };
            let (kind, message) = ("tool_progress", "canary-message");
            bridge.send(json!({ "type": kind, "request_id": request_id, "progress": 1, "message": message })).await;
            bridge.answer(&request_id, answer).await;
            call.await.unwrap();
        }
        let timing_out = client.call("echo", arguments).await;
        assert!(timing_out.text.contains("timed out"), "{}", timing_out.text);
        let cancelled = client.spawn_call("\"canary-id\"", "echo", arguments);
        let cancel = json!({ "requestId": "canary-id", "reason": "canary-reason" });
        let cancel = format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{cancel}}}"#);
        client.post(cancel).await;
        cancelled.await.unwrap();
        client.modern("tools/call", json!({ "name": "canary-tool", "arguments": { "x": "canary" } })).await;
        client.rpc("1", "canary-method", &format!(r#"{{"x":"{}"}}"#, "canary".repeat(12_000))).await;
        client.rpc("1", "canary-method", r#"{"x":canary}"#).await;

        // Frames that are no answers.
        for frame in [
            r#"{"type":"canary-type"}"#,
            r#"{"canary":canary"#,
            r#"{"type":"update_tools","tools":[{"name":"canary tool","title":7}]}"#,
            r#"{"type":"invoke_result","request_id":"canary-request","ok":true,"content":"canary-result"}"#,
        ] {
            bridge.send_text(frame).await;
        }
        bridge.socket.send(Message::binary(b"canary-binary".to_vec())).await.unwrap();
        bridge.socket.send(Message::Ping(b"canary-ping".to_vec().into())).await.unwrap();
        while !matches!(soon(bridge.socket.next()).await, Some(Ok(Message::Pong(_)))) {}
        bridge.socket.close(Some(CloseFrame { code: 1000.into(), reason: "canary".into() })).await.unwrap();
        until(async || send(session(get.clone(), "", app_token)).await.json()["bridge"]["connected"] == false).await;
        assert_eq!(send(session(delete, "", app_token)).await.status, 200);

        let log = logged.ended();
        for said in
            ["session registered", "bridge connected", "bad frame from the app", r#""event":"call""#, "session deleted"]
        {
            assert!(log.contains(said), "{said} is not in the log: {log}");
        }
        for canary in ["canary", &id, &secret, &mcp_token, &as_token, &as_secret, &as_token[..12]] {
            let line = log.lines().find(|line| line.contains(canary));
            assert_eq!(line, None, "{canary}");
        }
        let is_plain = |c: char| !c.is_control() || c == '\n';
        assert!(log.chars().all(|c| is_plain(c) && c != '\u{202e}'), "raw control characters");
        assert!(!log.lines().any(|line| line.starts_with("ERROR") || line.starts_with("2026-01-01")), "a forged line");
    }
}
