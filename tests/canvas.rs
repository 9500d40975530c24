//! The node's canvas: a real browser behind a real local MCP server, and real web pages on loopback.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use openclaw_mcp_proxy::node::capabilities::canvas::{Canvas, Link, Options};
use openclaw_mcp_proxy::node::capabilities::{Exposure, Registry};
use openclaw_mcp_proxy::node::local_mcp::{Config, Server};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::support::{McpClient, soon, timed, until};

/// A node that has a canvas and nothing else.
struct Node {
    client: McpClient,
    registry: Arc<Registry>,
    /// Where its browsers keep their profiles.
    profiles: PathBuf,
    shutdown: CancellationToken,
}

impl Node {
    async fn start() -> Self {
        Self::start_with(Options { headless: Some(true), ..Options::default() }).await
    }

    async fn start_with(options: Options) -> Self {
        let profiles = std::env::temp_dir().join(format!("openclaw-test-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&profiles).unwrap();
        let registry = Arc::new(Registry::new());
        let canvas = Canvas::new(Options { profiles: Some(profiles.clone()), ..options });
        registry.add(canvas, Exposure::Everywhere);
        let listener = Server::bind(0).await.unwrap();
        let url = format!("http://127.0.0.1:{}/", listener.local_addr().unwrap().port());
        let shutdown = CancellationToken::new();
        let server = Server::new(Config::default(), Arc::clone(&registry));
        tokio::spawn({
            let shutdown = shutdown.clone();
            async move { server.listen(listener, shutdown).await }
        });
        Node { client: McpClient::new(&url), registry, profiles, shutdown }
    }

    /// Whether a command failed, and its result or what it failed with.
    async fn ask(&self, command: &str, args: Value) -> Result<Value, String> {
        let reply = self.client.call(&format!("canvas.{command}"), &args.to_string()).await;
        let text = reply.tool_text();
        if reply.is_tool_error() { Err(text) } else { Ok(serde_json::from_str(&text).unwrap()) }
    }

    async fn tell(&self, command: &str, args: Value) -> Value {
        self.ask(command, args).await.unwrap_or_else(|error| {
            panic!("canvas.{command}: {error}; if chromium is missing, run tests/run, which installs it")
        })
    }

    async fn eval(&self, script: &str) -> String {
        self.tell("eval", json!({ "script": script })).await["result"].as_str().unwrap().to_owned()
    }

    async fn fails(&self, command: &str, args: Value) -> String {
        self.ask(command, args).await.expect_err("it failed")
    }

    /// Decodes a picture, and tells its size and the colour in its middle.
    async fn decode(&self, picture: &Value) -> Value {
        let (format, base64) = (picture["format"].as_str().unwrap(), picture["base64"].as_str().unwrap());
        let script = format!(
            "(async () => {{
                const image = new Image();
                image.src = 'data:image/{format};base64,{base64}';
                await image.decode();
                const drawn = new OffscreenCanvas(image.width, image.height).getContext('2d');
                drawn.drawImage(image, 0, 0);
                const middle = drawn.getImageData(image.width / 2, image.height / 2, 1, 1).data;
                return [image.width, image.height, ...middle.slice(0, 3)];
            }})()"
        );
        serde_json::from_str(&self.eval(&script).await).unwrap()
    }

    /// The processes of its browsers.
    fn processes(&self) -> Vec<String> {
        self.processes_with("")
    }

    /// Those whose command line holds `part`.
    fn processes_with(&self, part: &str) -> Vec<String> {
        let profiles = self.profiles.to_str().unwrap();
        let pids =
            std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        pids.filter(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.contains(profiles) && line.contains(part))
        })
        .collect()
    }

    /// Whether it has started no browser, or nothing of it is left.
    fn is_clean(&self) -> bool {
        self.processes().is_empty() && std::fs::read_dir(&self.profiles).unwrap().next().is_none()
    }

    /// Kills those processes of its browser whose command line holds `part`, as if they had crashed.
    async fn crash(&self, part: &str) {
        let browser = self.processes_with(part);
        assert!(!browser.is_empty());
        // Some end by themselves when the first one goes, and kill complains of them.
        let mut kill = Command::new("kill");
        kill.arg("-9").args(&browser).stderr(Stdio::null()).status().await.unwrap();
        until(async || self.processes().iter().all(|pid| !browser.contains(pid))).await;
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shutdown.cancel();
        // The runtime of a test ends without letting anybody clean up who needs time.
        let _may_be_gone =
            std::process::Command::new("kill").arg("-9").args(self.processes()).stderr(Stdio::null()).status();
        for _ in 0..100 {
            match std::fs::remove_dir_all(&self.profiles) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                _ => break,
            }
        }
    }
}

/// Web pages on loopback.
struct Web {
    base: String,
    /// Hears of each request for `/running`.
    running: Arc<Notify>,
    serving: JoinHandle<()>,
}

impl Web {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://127.0.0.1:{}", listener.local_addr().unwrap().port());
        let running = Arc::<Notify>::default();
        let noticed = Arc::clone(&running);
        let serving = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let noticed = Arc::clone(&noticed);
                tokio::spawn(async move {
                    let mut request = [0; 4096];
                    let read = stream.read(&mut request).await.unwrap_or(0);
                    let request = String::from_utf8_lossy(&request[..read]).into_owned();
                    let path = request.split(' ').nth(1).unwrap_or_default();
                    let answer = match path {
                        "/" => page("<title>Loopback</title><body style='background:#00ff00'>"),
                        "/running" => {
                            noticed.notify_one();
                            page("")
                        }
                        "/to-file" => "HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n".to_owned(),
                        "/to-page" => "HTTP/1.1 302 Found\r\nLocation: /\r\n".to_owned(),
                        "/download" => {
                            "HTTP/1.1 200 OK\r\nContent-Type: application/zip\r\nContent-Disposition: attachment\r\n"
                                .to_owned()
                        }
                        "/stays" => page(
                            "<title>Stays</title><script>onbeforeunload = event => event.preventDefault()</script>",
                        ),
                        _ => "HTTP/1.1 404 Not Found\r\n".to_owned(),
                    };
                    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer.trim_end(), ""));
                    let length = body.len();
                    let answer = format!("{head}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
                    let _gone = stream.write_all(answer.as_bytes()).await;
                });
            }
        });
        Web { base, running, serving }
    }
}

fn page(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<!doctype html>{body}")
}

impl Drop for Web {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// A push of these messages.
fn lines(messages: &[Value]) -> Value {
    json!({ "jsonl": messages.iter().map(Value::to_string).collect::<Vec<_>>().join("\n") })
}

fn components(components: &[(&str, Value)]) -> Value {
    let components: Vec<Value> =
        components.iter().map(|(id, component)| json!({ "id": id, "component": component })).collect();
    json!({ "surfaceUpdate": { "surfaceId": "main", "components": components } })
}

fn begin() -> Value {
    json!({ "beginRendering": { "surfaceId": "main", "root": "root" } })
}

fn label(text: &str) -> Value {
    json!({ "Text": { "text": { "literalString": text } } })
}

#[tokio::test]
async fn a_document_is_shown_and_pictured() {
    let node = Node::start().await;
    let red = json!({ "html": "<body style='background:#ff0000'>", "width": 400, "height": 300, "title": "Red" });
    assert_eq!(node.tell("present", red).await, json!({ "presented": true }));
    let (picture, took) = timed(node.tell("snapshot", json!({}))).await;
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(picture["format"], "png");
    assert_eq!(node.decode(&picture).await, json!([400, 300, 255, 0, 0]));
    let jpeg = node.tell("snapshot", json!({ "format": "JPG", "maxWidth": 200, "quality": 100 })).await;
    assert_eq!(jpeg["format"], "jpeg");
    let decoded = node.decode(&jpeg).await;
    assert_eq!((&decoded[0], &decoded[1]), (&json!(200), &json!(150)));
    assert!(decoded[2].as_u64() > Some(250) && decoded[3].as_u64() < Some(5), "{decoded}");
    assert_eq!(node.eval("document.title").await, "Red");
    assert!(node.fails("snapshot", json!({ "format": "svg" })).await.contains("Supported formats: png, jpeg"));
    let result = node.client.call("canvas.snapshot", "{}").await.json();
    assert_eq!(result["result"]["content"][1]["mimeType"], "image/png", "clients that can show pictures do");
    // Extremes are clamped.
    node.tell("present", json!({ "html": "<title>Own</title>", "width": 5, "height": 5, "title": "Other" })).await;
    assert_eq!(node.eval("[innerWidth, innerHeight, document.title]").await, r#"[100,100,"Own"]"#);
    assert_eq!(node.decode(&node.tell("snapshot", json!({ "maxWidth": 1 })).await).await[0], 32);
}

#[tokio::test]
async fn only_web_addresses_are_shown_and_others_start_nothing() {
    let node = Node::start().await;
    for (url, says) in [
        ("javascript:alert(1)", "only http and https"),
        ("file:///etc/passwd", "only http and https"),
        ("ms-settings:", "only http and https"),
        ("data:text/html,x", "only http and https"),
        ("about:blank", "only http and https"),
        ("page.html", "not an absolute URL"),
        ("//example.com/", "not an absolute URL"),
        ("http://", "not an absolute URL"),
        ("http://user@example.com/", "user name or password"),
        ("http://:word@example.com/", "user name or password"),
    ] {
        for command in ["navigate", "present"] {
            let error = node.fails(command, json!({ "url": url })).await;
            assert!(error.starts_with("Invalid url: ") && error.contains(says), "{url}: {error}");
        }
    }
    assert_eq!(node.fails("navigate", json!({ "url": 7 })).await, "Missing url parameter");
    assert_eq!(node.fails("eval", json!({})).await, "Missing script parameter");
    for command in ["eval", "snapshot"] {
        assert!(node.fails(command, json!({ "script": "1" })).await.starts_with("CANVAS_NOT_OPEN"));
    }
    assert_eq!(node.tell("hide", json!({})).await, json!({ "hidden": true }));
    assert_eq!(node.tell("a2ui.reset", json!({})).await, json!({ "reset": true }));
    assert_eq!(node.tell("a2ui.dump", json!({})).await["surfaceCount"], 0);
    assert!(node.is_clean(), "no browser was started");
}

#[tokio::test]
async fn a_page_is_loaded_and_what_is_none_is_told() {
    let (node, web) = (Node::start().await, Web::start().await);
    let shouted = web.base.replace("http", "HTTP");
    let navigated = node.tell("navigate", json!({ "url": shouted })).await;
    let canonical = format!("{}/", web.base);
    assert_eq!(navigated, json!({ "navigated": true, "opener": "canvas", "url": canonical }));
    assert_eq!(node.eval("document.title + ' ' + location.href").await, format!("Loopback {canonical}"));
    assert_eq!(node.decode(&node.tell("snapshot", json!({})).await).await, json!([800, 600, 0, 255, 0]));
    let to = async |path: &str| node.ask("navigate", json!({ "url": format!("{}{path}", web.base) })).await;
    assert_eq!(to("/to-page").await.unwrap()["navigated"], true);
    let download = to("/download").await.unwrap();
    assert_eq!((&download["navigated"], &download["opener"]), (&json!(false), &json!("unsupported_in_canvas")));
    assert_eq!(to("/to-file").await, Err("Navigate failed".to_owned()));
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let nobody = json!({ "url": format!("http://{nobody}/") });
    assert_eq!(node.fails("navigate", nobody.clone()).await, "Navigate failed");
    assert_eq!(node.tell("present", nobody).await, json!({ "presented": true }), "the user sees what is wrong");
    // A page that asks whether it may be left is left.
    assert_eq!(to("/stays").await.unwrap()["navigated"], true);
    assert_eq!(to("/").await.unwrap()["navigated"], true);
    assert_eq!(node.eval("document.title").await, "Loopback");
}

#[tokio::test]
async fn results_are_strings() {
    let node = Node::start().await;
    node.tell("present", json!({ "html": "<p>" })).await;
    for (script, result) in [
        ("'text'", "text"),
        ("1 + 1", "2"),
        ("true", "true"),
        ("null", "null"),
        ("undefined", "null"),
        ("NaN", "NaN"),
        ("123n", "123n"),
        ("({ a: [1, 'b'] })", r#"{"a":[1,"b"]}"#),
        ("new Promise(done => setTimeout(() => done('late'), 50))", "late"),
    ] {
        assert_eq!(node.eval(script).await, result, "{script}");
    }
    for name in ["javaScript", "javascript"] {
        assert_eq!(node.tell("eval", json!({ name: "6 * 7" })).await["result"], "42");
    }
    for script in ["throw new Error('secret')", "Promise.reject('secret')", "secret syntax", "window"] {
        assert_eq!(node.fails("eval", json!({ "script": script })).await, "Eval failed", "{script}");
    }
}

#[tokio::test]
async fn files_windows_and_downloads_are_out_of_reach() {
    let (node, web) = (Node::start().await, Web::start().await);
    let secret = node.profiles.join("secret.txt");
    std::fs::write(&secret, "top secret").unwrap();
    let file = format!("file://{}", secret.display());
    let probe = format!(
        "(async () => {{
            const tried = [];
            try {{ tried.push(await (await fetch('{file}')).text()) }} catch {{}}
            const frame = document.createElement('iframe');
            frame.src = '{file}';
            document.body.append(frame);
            await new Promise(done => setTimeout(done, 300));
            try {{ tried.push(frame.contentDocument.body.textContent) }} catch {{}}
            const request = new XMLHttpRequest();
            try {{ request.open('GET', '{file}', false); request.send(); tried.push(request.responseText) }} catch {{}}
            try {{ open('{file}') }} catch {{}}
            try {{ location = '{file}' }} catch {{}}
            tried.push(String(open('about:blank')), Notification.permission);
            return tried.join('|');
        }})()"
    );
    for shown in [json!({ "html": "<body>" }), json!({ "url": web.base })] {
        node.tell("present", shown).await;
        let found = node.eval(&probe).await;
        assert!(!found.contains("secret") && found.contains("null") && !found.contains("granted"), "{found}");
        let now = node.eval("location.protocol + document.body.innerText").await;
        assert!(!now.contains("file:") && !now.contains("secret"), "{now}");
    }
}

#[tokio::test]
async fn surfaces_are_drawn_and_what_is_entered_and_pressed_is_told() {
    let node = Node::start().await;
    let push = lines(&[
        components(&[
            ("root", json!({ "Column": { "children": { "explicitList": ["title", "name", "list", "go"] } } })),
            ("title", json!({ "Text": { "usageHint": "h1", "text": { "path": "/title" } } })),
            (
                "name",
                json!({ "TextField": { "label": { "literalString": "Name" }, "text": { "path": "/form/name", "literalString": "Guest" } } }),
            ),
            (
                "list",
                json!({ "List": { "children": { "template": { "componentId": "item", "dataBinding": "/items" } } } }),
            ),
            ("item", json!({ "Text": { "text": { "path": "label" } } })),
            ("go-text", label("Go")),
            (
                "go",
                json!({ "Button": { "child": "go-text", "primary": true, "action": { "name": "submit", "context": [
                { "key": "who", "value": { "path": "/form/name" } },
                { "key": "times", "value": { "literalNumber": 3 } },
            ] } } }),
            ),
        ]),
        json!({ "dataModelUpdate": { "surfaceId": "main", "path": "/title", "contents": [{ "key": ".", "valueString": "<img src=x onerror=alert(1)>" }] } }),
        json!({ "dataModelUpdate": { "surfaceId": "main", "path": "/items", "contents": [
            { "key": "item2", "valueMap": [{ "key": "label", "valueString": "second" }] },
            { "key": "item10", "valueMap": [{ "key": "label", "valueString": "tenth" }] },
            { "key": "item1", "valueMap": [{ "key": "label", "valueString": "first" }] },
        ] } }),
        begin(),
    ]);
    let props = json!({ "jsonl": push["jsonl"], "props": { "from": "a test" } });
    assert_eq!(node.tell("a2ui.push", props).await, json!({ "pushed": true }));
    assert_eq!(node.eval("document.querySelector('h1').textContent").await, "<img src=x onerror=alert(1)>");
    assert_eq!(node.eval("document.images.length").await, "0");
    let items = "[...document.querySelectorAll('[data-component=item]')].map(item => item.textContent)";
    assert_eq!(node.eval(items).await, r#"["second","tenth","first"]"#, "in their order");
    assert_eq!(node.eval("document.querySelector('input').value").await, "Guest");
    // The user types and presses.
    node.eval(
        "const field = document.querySelector('input'); field.value = 'Ada'; field.dispatchEvent(new Event('input'))",
    )
    .await;
    node.eval("[...document.querySelectorAll('button')].find(button => button.textContent === 'Go').click()").await;
    let dump = node.tell("a2ui.dump", json!({})).await;
    let surface = &dump["surfaces"][0];
    assert_eq!(
        (&dump["renderer"], &dump["a2uiVersion"], &dump["surfaceCount"]),
        (&json!("web"), &json!("0.8"), &json!(1))
    );
    assert_eq!((&surface["surfaceId"], &surface["root"]), (&json!("main"), &json!("root")));
    assert_eq!(surface["components"].as_array().unwrap().len(), 7);
    assert_eq!(surface["dataModel"]["form"], json!({ "name": "Ada" }));
    let action = &dump["userActions"][0];
    assert_eq!((&action["name"], &action["sourceComponentId"]), (&json!("submit"), &json!("go")));
    assert_eq!(action["context"], json!({ "who": "Ada", "times": 3 }));
    assert_eq!(dump["props"], json!({ "from": "a test" }));
    // More data, and what was entered stays.
    let more = json!({ "dataModelUpdate": { "surfaceId": "main", "contents": [{ "key": "title", "valueString": "New" }], "path": "/" } });
    let name = json!({ "dataModelUpdate": { "surfaceId": "main", "path": "form", "contents": [{ "key": "name", "valueString": "Bob" }] } });
    node.tell("a2ui.pushJSONL", lines(&[more, name])).await;
    assert_eq!(
        node.eval("document.querySelector('h1').textContent + document.querySelector('input').value").await,
        "NewBob"
    );
    // Scripts of the page have no way to report anything.
    assert_eq!(node.eval("typeof openclawReport + typeof openclawA2ui").await, "undefinedundefined");
    assert_eq!(node.tell("a2ui.reset", json!({})).await, json!({ "reset": true }));
    assert_eq!(node.eval("document.body.textContent").await, "");
    assert_eq!(node.tell("a2ui.dump", json!({})).await["surfaces"], json!([]));
}

#[tokio::test]
async fn the_whole_catalogue_is_drawn() {
    let node = Node::start().await;
    let text = |text: &str| json!({ "literalString": text });
    let pixel = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7";
    let all = [
        ("Text", label("a text")),
        ("Image", json!({ "Image": { "url": text(pixel), "fit": "cover", "usageHint": "avatar" } })),
        ("Icon", json!({ "Icon": { "name": text("star") } })),
        ("Video", json!({ "Video": { "url": text("https://example.com/a.mp4") } })),
        (
            "AudioPlayer",
            json!({ "AudioPlayer": { "url": text("https://example.com/a.mp3"), "description": text("a sound") } }),
        ),
        (
            "Row",
            json!({ "Row": { "children": { "explicitList": ["Text"] }, "distribution": "spaceBetween", "alignment": "center" } }),
        ),
        ("List", json!({ "List": { "children": { "explicitList": ["Text"] }, "direction": "horizontal" } })),
        ("Card", json!({ "Card": { "child": "Text" } })),
        (
            "Tabs",
            json!({ "Tabs": { "tabItems": [{ "title": text("one"), "child": "Text" }, { "title": text("two"), "child": "Icon" }] } }),
        ),
        ("Divider", json!({ "Divider": { "axis": "horizontal" } })),
        ("Modal", json!({ "Modal": { "entryPointChild": "Text", "contentChild": "Icon" } })),
        ("Button", json!({ "Button": { "child": "Text", "action": { "name": "press" } } })),
        (
            "CheckBox",
            json!({ "CheckBox": { "label": text("check"), "value": { "path": "/checked", "literalBoolean": true } } }),
        ),
        (
            "TextField",
            json!({ "TextField": { "label": text("field"), "text": { "path": "/field" }, "textFieldType": "longText" } }),
        ),
        (
            "DateTimeInput",
            json!({ "DateTimeInput": { "value": text("2026-02-03T04:05:00Z"), "enableDate": true, "enableTime": true } }),
        ),
        (
            "MultipleChoice",
            json!({ "MultipleChoice": { "selections": { "path": "/chosen", "literalArray": ["b"] }, "maxAllowedSelections": 1,
            "options": [{ "label": text("A"), "value": "a" }, { "label": text("B"), "value": "b" }] } }),
        ),
        (
            "Slider",
            json!({ "Slider": { "value": { "path": "/volume", "literalNumber": 7 }, "minValue": 0, "maxValue": 10 } }),
        ),
        ("Unknown", json!({ "Hologram": {} })),
    ];
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    let root = ("root", json!({ "Column": { "children": { "explicitList": names } } }));
    node.tell("a2ui.push", lines(&[components(&[&all[..], &[root]].concat()), begin()])).await;
    for (script, result) in [
        (
            "[...document.querySelector('[data-component=root]').children].map(child => child.dataset.component).join()",
            &*names.join(","),
        ),
        ("document.images[0].naturalWidth", "1"),
        ("document.querySelector('.icon').textContent", "★"),
        ("document.querySelector('input[type=checkbox]').checked", "true"),
        ("document.querySelector('input[type=datetime-local]').value", "2026-02-03T04:05"),
        ("document.querySelector('input[type=radio]:checked').parentElement.textContent", "B"),
        ("document.querySelector('input[type=range]').value", "7"),
        ("document.querySelector('.unknown').textContent", "Hologram is not supported"),
        ("[...document.querySelectorAll('.tabs > div:not(.titles)')].map(panel => panel.hidden)", "[false,true]"),
    ] {
        assert_eq!(node.eval(script).await, result, "{script}");
    }
    node.eval("document.querySelectorAll('.titles > button')[1].click()").await;
    node.eval(
        "document.querySelector('input[type=checkbox]').click(); document.querySelector('input[type=radio]').click()",
    )
    .await;
    node.eval("document.querySelector('[data-component=Modal] > div').click()").await;
    assert_eq!(node.eval("document.querySelector('dialog').open").await, "true");
    let data = node.tell("a2ui.dump", json!({})).await["surfaces"][0]["dataModel"].clone();
    assert_eq!(data, json!({ "checked": false, "chosen": ["a"], "volume": 7 }));
    // The chosen tab stays when all is drawn again.
    node.tell("a2ui.push", lines(&[begin()])).await;
    let hidden = "[...document.querySelectorAll('.tabs > div:not(.titles)')].map(panel => panel.hidden)";
    assert_eq!(node.eval(hidden).await, "[true,false]");
}

#[tokio::test]
async fn a_push_is_applied_whole_or_not_at_all() {
    let node = Node::start().await;
    node.tell("a2ui.push", lines(&[components(&[("root", label("before"))]), begin()])).await;
    let other = components(&[("root", label("after"))]);
    let wrong = json!({ "surfaceUpdate": { "surfaceId": "main", "components": [{ "id": "x", "component": {} }] } });
    let new = json!({ "createSurface": { "surfaceId": "main" } });
    let deep = json!({ "dataModelUpdate": { "surfaceId": "main", "contents": [{ "key": "k" }] } });
    for (bad, says) in [(wrong, "one kind"), (new, "A2UI 0.9 is not understood"), (deep, "one value of its type")] {
        let error = node.fails("a2ui.push", lines(&[other.clone(), bad])).await;
        assert!(error.starts_with("A2UI line 2: ") && error.contains(says), "{error}");
        assert_eq!(node.eval("document.body.textContent").await, "before");
        let surface = node.tell("a2ui.dump", json!({})).await["surfaces"][0].clone();
        assert_eq!(surface["components"][0]["component"], label("before"));
    }
    // Each bound on both sides.
    let surfaces = |count: usize| -> Vec<Value> {
        (0..count).map(|index| json!({ "beginRendering": { "surfaceId": format!("s{index}"), "root": "r" } })).collect()
    };
    node.tell("a2ui.push", lines(&surfaces(63))).await;
    assert!(node.fails("a2ui.push", lines(&surfaces(64))).await.contains("at most 64 surfaces"));
    let many = |count: usize| {
        let ids: Vec<String> = (0..count).map(|index| index.to_string()).collect();
        let all: Vec<(&str, Value)> = ids.iter().map(|id| (&**id, label("x"))).collect();
        components(&all)
    };
    node.tell("a2ui.push", lines(&[many(1999)])).await;
    assert!(node.fails("a2ui.push", lines(&[many(2000)])).await.contains("at most 2000 components"));
    assert_eq!(node.fails("a2ui.push", json!({})).await, "Missing jsonl or jsonlPath parameter");
    assert_eq!(node.client.call("canvas.a2ui.push", "null").await.tool_text(), "Missing jsonl or jsonlPath parameter");
}

#[tokio::test]
async fn components_that_hold_themselves_or_each_other_are_drawn_only_so_far() {
    let node = Node::start().await;
    let twice = |child: &str| json!({ "Column": { "children": { "explicitList": [child, child] } } });
    let chain: Vec<String> = (0..80).map(|index| index.to_string()).collect();
    let mut all = vec![("root", twice("0"))];
    all.extend((0..79).map(|index| (&*chain[index], twice(&chain[index + 1]))));
    let (_, took) = timed(node.tell("a2ui.push", lines(&[components(&all), begin()]))).await;
    assert!(took < Duration::from_secs(15), "{took:?}");
    let drawn: usize = node.eval("document.querySelectorAll('[data-component]').length").await.parse().unwrap();
    assert_eq!(drawn, 20_000);
    node.tell("a2ui.push", lines(&[components(&[("root", json!({ "Card": { "child": "root" } }))]), begin()])).await;
    assert_eq!(node.eval("document.querySelectorAll('.card').length").await, "64");
}

#[tokio::test]
async fn a_push_can_come_from_a_file_for_passing_things_on() {
    let node = Node::start().await;
    let path = node.profiles.join("push.jsonl");
    std::fs::write(&path, lines(&[components(&[("root", label("from a file"))]), begin()])["jsonl"].as_str().unwrap())
        .unwrap();
    node.tell("a2ui.push", json!({ "jsonlPath": path })).await;
    assert_eq!(node.eval("document.body.textContent").await, "from a file");
    for path in ["/etc/passwd", "push.jsonl", "/tmp/../etc/passwd", "/tmp/no-such-file"] {
        assert_eq!(node.fails("a2ui.push", json!({ "jsonlPath": path })).await, "Failed to read jsonlPath", "{path}");
    }
    std::fs::write(&path, vec![b' '; (4 << 20) + 1]).unwrap();
    let error = node.fails("a2ui.push", json!({ "jsonlPath": path })).await;
    assert_eq!(error, "jsonl exceeds maximum size of 4194304 bytes");
}

#[tokio::test]
async fn what_is_hidden_is_still_there() {
    let node = Node::start().await;
    node.tell("present", json!({ "html": "<title>Here</title>" })).await;
    node.eval("kept = 1").await;
    assert_eq!(node.tell("hide", json!({})).await, json!({ "hidden": true }));
    assert_eq!(node.eval("document.title + kept").await, "Here1");
    node.tell("present", json!({ "width": 300, "height": 200 })).await;
    assert_eq!(node.eval("document.title + kept + innerWidth").await, "Here1300");
}

#[tokio::test]
async fn a_script_that_never_ends_is_interrupted_and_a_dialog_is_dismissed() {
    let options = Options { script_timeout: Duration::from_millis(700), headless: Some(true), ..Options::default() };
    let node = Node::start_with(options).await;
    node.tell("present", json!({ "html": "<title>Busy</title>" })).await;
    let forever = ["while (true) {}", "new Promise(() => {})", "Promise.resolve().then(() => { while (true) {} })"];
    for script in forever {
        let (error, took) = timed(node.fails("eval", json!({ "script": script }))).await;
        assert!(error.starts_with("CANVAS_TIMEOUT") && took < Duration::from_secs(5), "{error} {took:?}");
        assert_eq!(node.eval("document.title").await, "Busy", "after {script}");
    }
    assert_eq!(node.eval("alert('hello'), String(confirm('sure?')) + prompt('who?')").await, "falsenull");
    // One that comes while nobody asks for anything.
    node.eval("setTimeout(() => { alert('later'); document.title = 'Later' }, 10); 0").await;
    until(async || node.eval("document.title").await == "Later").await;
    // A document that never finishes is shown as it is.
    let (presented, took) = timed(node.tell("present", json!({ "html": "<script>while (true) {}</script>" }))).await;
    assert_eq!(presented, json!({ "presented": true }));
    assert!(took < Duration::from_secs(20), "{took:?}");
    node.tell("present", json!({ "html": "<title>Fine</title>" })).await;
    assert_eq!(node.eval("document.title").await, "Fine");
}

#[tokio::test]
async fn a_cancelled_script_frees_the_canvas() {
    let (node, web) = (Node::start().await, Web::start().await);
    node.tell("present", json!({ "url": web.base })).await;
    let script =
        "const request = new XMLHttpRequest(); request.open('GET', '/running', false); request.send(); while (true) {}";
    let endless = node.client.spawn_call("7", "canvas.eval", &json!({ "script": script }).to_string());
    soon(web.running.notified()).await;
    let cancelled = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":7}}"#;
    node.client.post(cancelled).await;
    let (_, took) = timed(async { soon(endless).await }).await;
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(node.eval("document.title").await, "Loopback");
}

#[tokio::test]
async fn a_browser_that_crashed_is_replaced_and_surfaces_outlive_it() {
    let node = Node::start().await;
    node.tell("a2ui.push", lines(&[components(&[("root", label("lasting"))]), begin()])).await;
    node.crash("").await;
    assert!(node.fails("eval", json!({ "script": "1" })).await.starts_with("CANVAS_NOT_OPEN"));
    assert_eq!(node.tell("present", json!({})).await, json!({ "presented": true }));
    assert_eq!(node.eval("document.body.textContent").await, "lasting");
    // Its page alone may crash, too.
    node.crash("--type=renderer").await;
    assert!(node.fails("eval", json!({ "script": "1" })).await.starts_with("CANVAS_NOT_OPEN"));
    node.tell("present", json!({ "html": "<title>Again</title>" })).await;
    assert_eq!(node.eval("document.title").await, "Again");
    let profiles = std::fs::read_dir(&node.profiles).unwrap().count();
    assert_eq!(profiles, 1, "those of the crashed browsers are removed");
    // A page that is led elsewhere is no page of ours any more, and is made one again.
    node.tell("a2ui.push", lines(&[begin()])).await;
    node.eval("location = 'about:blank#away'; 0").await;
    node.tell("a2ui.push", lines(&[components(&[("root", label("back"))])])).await;
    assert_eq!(node.eval("document.body.textContent").await, "back");
}

#[tokio::test]
async fn whoever_steers_it_from_elsewhere_cannot_look_into_this_network() {
    let web = Web::start().await;
    let port = web.base.rsplit(':').next().unwrap();
    let addresses = [web.base.clone(), format!("http://localhost:{port}"), format!("http://2130706433:{port}")];
    let is_reached = async || timeout(Duration::from_millis(700), web.running.notified()).await.is_ok();
    for reaches_private_network in [true, false] {
        let options = Options { headless: Some(true), reaches_private_network, ..Options::default() };
        let node = Node::start_with(options).await;
        for address in &addresses {
            let url = format!("{address}/running");
            let navigated = node.ask("navigate", json!({ "url": url })).await;
            assert_eq!(navigated.is_ok(), reaches_private_network, "{url} {navigated:?}");
            assert_eq!(is_reached().await, reaches_private_network, "{url}");
            node.tell("present", json!({ "html": format!("<img src='{url}'>") })).await;
            // Chromium may forbid that by itself.
            assert!(!is_reached().await || reaches_private_network, "{url} as a picture");
            node.tell("present", json!({ "html": "<p>" })).await;
            node.eval(&format!("location = '{url}'; 0")).await;
            assert_eq!(is_reached().await, reaches_private_network, "{url} by a script");
        }
    }
}

#[tokio::test]
async fn nothing_is_left_when_the_canvas_goes() {
    let node = Node::start().await;
    node.tell("present", json!({ "html": "<p>" })).await;
    assert!(node.processes().len() > 1 && !node.is_clean());
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let profile = std::fs::read_dir(&node.profiles).unwrap().next().unwrap().unwrap();
        assert_eq!(profile.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }
    node.registry.replace(Vec::new());
    until(async || node.is_clean()).await;
}

#[test]
fn nothing_is_left_when_the_node_ends_in_the_middle() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let node = runtime.block_on(async {
        let node = Node::start().await;
        node.tell("present", json!({ "html": "<p>" })).await;
        let _under_way = node.client.spawn_call("1", "canvas.eval", r#"{"script":"while (true) {}"}"#);
        node
    });
    drop(runtime);
    // They were killed; the kernel takes them away in its own time.
    let since = std::time::Instant::now();
    while !node.is_clean() {
        assert!(since.elapsed() < std::time::Duration::from_secs(10), "{:?}", node.processes());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[tokio::test]
async fn without_a_browser_only_its_absence_is_told() {
    let missing = Options { program: Some("/no/such/browser".into()), ..Options::default() };
    let node = Node::start_with(missing).await;
    let listed = node.client.rpc("1", "tools/list", "{}").await.json();
    let names: Vec<&Value> = listed["result"]["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
    assert_eq!(names, ["canvas.caps"]);
    let none = json!({ "version": "0.8", "push": false, "reset": false, "introspect": false });
    assert_eq!(
        node.tell("caps", json!({})).await,
        json!({ "renderer": "none", "eval": false, "snapshot": false, "navigate": false, "a2ui": none })
    );
    let push = lines(&[begin()]);
    for (command, args, says) in [
        ("present", json!({ "html": "<p>" }), "CANVAS_NOT_AVAILABLE"),
        ("navigate", json!({ "url": "http://127.0.0.1/" }), "CANVAS_NOT_AVAILABLE"),
        ("a2ui.push", push, "CANVAS_NOT_AVAILABLE"),
        ("a2ui.dump", json!({}), "CANVAS_NOT_OPEN"),
        ("eval", json!({ "script": "1" }), "Canvas not available"),
        ("snapshot", json!({}), "Canvas not available"),
        ("paint", json!({}), "Unknown tool: canvas.paint"),
    ] {
        let error = node.fails(command, args).await;
        assert!(error.starts_with(says), "{command}: {error}");
    }
    let there = Node::start().await;
    assert_eq!(there.tell("caps", json!({})).await["renderer"], "web");
    assert_eq!(there.client.rpc("1", "tools/list", "{}").await.json()["result"]["tools"].as_array().unwrap().len(), 10);
}

#[tokio::test]
async fn a_program_that_is_no_browser_is_told() {
    let wrong = Options { program: Some("/bin/true".into()), headless: Some(true), ..Options::default() };
    let node = Node::start_with(wrong).await;
    let error = node.fails("present", json!({ "html": "<p>" })).await;
    assert_eq!(error, "CANVAS_NOT_AVAILABLE: the browser cannot be started");
    assert_eq!(node.fails("navigate", json!({ "url": "http://127.0.0.1/" })).await, "Navigate failed");
    until(async || node.is_clean()).await;
}

#[tokio::test]
async fn a_port_does_as_well_as_pipes() {
    let node = Node::start_with(Options { link: Link::Port, headless: Some(true), ..Options::default() }).await;
    node.tell("present", json!({ "html": "<body style='background:#0000ff'>", "width": 200, "height": 100 })).await;
    assert_eq!(node.decode(&node.tell("snapshot", json!({})).await).await, json!([200, 100, 0, 0, 255]));
    node.registry.replace(Vec::new());
    until(async || node.is_clean()).await;
}

/// A screen of one test.
struct Screen {
    _server: Child,
    name: String,
}

impl Screen {
    async fn start() -> Self {
        let mut server = Command::new("Xvfb")
            .args(["-displayfd", "1", "-screen", "0", "1280x1024x24", "-nolisten", "tcp"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("Xvfb is missing: run tests/run, which installs it");
        let mut line = String::new();
        soon(BufReader::new(server.stdout.take().unwrap()).read_line(&mut line)).await.unwrap();
        Screen { _server: server, name: format!(":{}", line.trim()) }
    }
}

/// A program that runs the browser on this screen.
fn browser_on(screen: &Screen, folder: &Path) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = folder.join("browser");
    std::fs::write(&path, format!("#!/bin/sh\nDISPLAY={} exec chromium \"$@\"\n", screen.name)).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[tokio::test]
async fn a_screen_gets_a_window() {
    let screen = Screen::start().await;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("screen-{}", uuid::Uuid::new_v4().simple()));
    std::fs::create_dir(&folder).unwrap();
    let program = Some(browser_on(&screen, &folder));
    let node = Node::start_with(Options { program, headless: Some(false), ..Options::default() }).await;
    let red = json!({ "html": "<body style='background:#ff0000'>", "width": 640, "height": 480, "x": 30, "y": 40 });
    node.tell("present", red).await;
    assert_eq!(node.eval("[innerWidth, innerHeight, screenX, screenY]").await, "[640,480,30,40]");
    assert_eq!(node.decode(&node.tell("snapshot", json!({})).await).await, json!([640, 480, 255, 0, 0]));
    node.tell("hide", json!({})).await;
    assert_eq!(node.decode(&node.tell("snapshot", json!({})).await).await, json!([640, 480, 255, 0, 0]));
    node.tell("present", json!({ "width": 600, "height": 200 })).await;
    let off_centre = "Math.abs(screenX * 2 + outerWidth - 1280) + Math.abs(screenY * 2 + outerHeight - 1024)";
    let placed: Value =
        serde_json::from_str(&node.eval(&format!("[innerWidth, innerHeight, {off_centre}]")).await).unwrap();
    assert_eq!((&placed[0], &placed[1]), (&json!(600), &json!(200)));
    assert!(placed[2].as_u64() <= Some(2), "{placed}");
    node.registry.replace(Vec::new());
    until(async || node.is_clean()).await;
    std::fs::remove_dir_all(folder).unwrap();
}
