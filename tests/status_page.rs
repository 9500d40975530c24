//! The operator's status page, in a real browser, over a real proxy with real apps.

use std::process::Stdio;

use rmcp::ServiceExt;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use rmcp::transport::{StreamableHttpClientTransport, TokioChildProcess};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::chromium::Chromium;
use crate::support::{App, TestServer, soon, tools};

const ADMIN: (&str, &str) = ("ADMIN_LISTEN", "127.0.0.1:0");

/// The status page of a server.
struct Page {
    chromium: Chromium,
    base: String,
}

impl Page {
    async fn open(server: &TestServer) -> Self {
        let base = server.admin.clone().unwrap();
        let mut chromium = Chromium::start().await;
        chromium.open(&format!("{base}/")).await;
        chromium.until("document.getElementById('live')?.innerText === 'Live'").await;
        Page { chromium, base }
    }

    async fn until(&mut self, expression: &str) {
        self.chromium.until(&format!("(text => {expression})(id => document.getElementById(id).innerText)")).await;
    }

    async fn click(&mut self, selector: &str) {
        self.chromium.eval(&format!("document.querySelector({}).click()", json!(selector))).await;
    }

    /// Shows the session of this app.
    async fn show(&mut self, app: &App) {
        self.chromium.eval(&format!("location.hash = '#/session/{}'", app.id)).await;
        self.until(&format!("text('s-url').endsWith('{}') && text('s-about').includes('{}')", app.id, app.id)).await;
    }

    /// The configuration of this client, as it is shown.
    async fn config(&mut self, client: &str) -> Value {
        let tab = format!("[...document.querySelectorAll('[role=tab]')].find(tab => tab.innerText === '{client}')");
        self.chromium.eval(&format!("{tab}.click()")).await;
        assert_eq!(self.chromium.eval(&format!("{tab}.ariaSelected")).await, "true");
        let text = self.chromium.text("s-code").await;
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{client}: {error}: {text}"))
    }

    /// Nothing went wrong in it, and it asked nobody but its own listener.
    fn is_clean(&self) {
        assert_eq!(self.chromium.errors(), Vec::<&Value>::new());
        let is_own = |url: &String| url.starts_with(&format!("{}/", self.base)) || url.starts_with("data:");
        let foreign: Vec<String> = self.chromium.requests().into_iter().filter(|url| !is_own(url)).collect();
        assert_eq!(foreign, Vec::<String>::new());
    }
}

#[tokio::test]
async fn calls_appear_as_they_come_and_what_came_before_is_there_too() {
    let server = TestServer::start(&[ADMIN, ("MAX_CALLS_PER_SESSION", "1")]).await;
    let app = App::register_with(
        &server,
        json!({ "device_id": "d", "device_name": "Front desk", "tools": tools(&["echo"]) }),
    )
    .await;
    let mut bridge = app.connect().await;
    let client = app.client();
    let running = client.spawn_call("1", "echo", r#"{"x":"canary"}"#);
    let (id, _, _) = bridge.invoked().await;
    client.call("echo", "{}").await;
    bridge.answer(&id, r#""ok":false,"error":"canary""#).await;
    soon(running).await.unwrap();

    let mut page = Page::open(&server).await;
    page.until("text('recent').includes('busy') && text('recent').includes('tool error')").await;
    page.until("text('verdict') === 'Worth a look' && text('issues').includes('MAX_CALLS_PER_SESSION was met once')")
        .await;
    page.until("text('v-failed').startsWith('2 ') && text('v-limits') === '1' && text('v-apps') === '1 of 1'").await;
    page.until("text('errors').includes('MAX_CALLS_PER_SESSION') && text('sessions').includes('Front desk')").await;
    page.until("text('sessions').includes('connected')").await;
    page.until("text('tenants').includes('default') && text('tenants').includes('1 of 1,000')").await;

    let rows = "document.querySelectorAll('#recent tbody tr').length";
    for n in 0..3 {
        let call = client.spawn_call("1", "echo", "{}");
        bridge.answer_next(&format!(r#""ok":true,"content":"canary {n}""#)).await;
        soon(call).await.unwrap();
    }
    page.until(&format!("{rows} === 5")).await;
    page.until("/µs|ms/.test(text('times')) && document.querySelectorAll('#chart path').length === 3").await;
    assert_eq!(
        page.chromium.eval("document.querySelector('#recent tbody tr').children[3].innerText.trim()").await,
        "ok"
    );

    // A list that is held shows how many have come meanwhile, and goes on.
    page.click("#pause").await;
    let call = client.spawn_call("1", "echo", "{}");
    bridge.answer_next(r#""ok":true,"content":1"#).await;
    soon(call).await.unwrap();
    page.until("text('pause') === 'Go on (1 new)'").await;
    assert_eq!(page.chromium.eval(rows).await, 5);
    page.click("#pause").await;
    page.until(&format!("{rows} === 6 && text('pause') === 'Pause'")).await;
    page.click("#failed-only").await;
    page.until(&format!("{rows} === 2 && !text('recent').includes(' ok')")).await;
    assert_eq!(page.chromium.eval("document.body.innerText.includes('canary')").await, false);
    page.is_clean();
}

#[tokio::test]
async fn a_proxy_that_does_well_is_said_to_and_one_that_stops_is_said_to_stop() {
    let server = TestServer::start(&[ADMIN]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let mut page = Page::open(&server).await;
    page.until("text('verdict') === 'All is well' && text('v-failed') === '0' && text('errors').includes('no limit')")
        .await;
    let call = app.client().spawn_call("1", "echo", "{}");
    let (id, _, _) = bridge.invoked().await;
    page.until("text('capacity').includes('1 of 10,000')").await;
    server.begin_stop();
    page.until("text('verdict') === 'The proxy is stopping'").await;
    bridge.answer(&id, r#""ok":true,"content":1"#).await;
    assert_eq!(soon(call).await.unwrap().status, 200);
    server.stopped().await;
}

#[tokio::test]
async fn what_apps_name_is_shown_as_text() {
    const NAME: &str = "<img src=x onerror=alert(1)><script>alert(2)</script>";
    let server = TestServer::start(&[ADMIN]).await;
    let tool = format!("<b onmouseover=alert(3)>{}", "W".repeat(104));
    assert_eq!(tool.len(), 128);
    let registration = json!({ "device_id": "d", "device_name": NAME, "app_version": NAME, "tools": tools(&[&tool]) });
    let app = App::register_with(&server, registration).await;
    // The name of a device may be that of its id, which may hold anything.
    let reversed = json!({ "device_id": "\u{202e}drowssap\u{2066}\u{0}", "tools": [] });
    App::register_with(&server, reversed).await;
    let long = App::register_with(&server, json!({ "device_id": "W".repeat(1024) })).await;
    let bridge = app.connect().await.echo();
    let mut page = Page::open(&server).await;
    for width in [1440, 360] {
        page.chromium.look(width, 900, false).await;
        page.chromium.eval("location.hash = '#/'").await;
        assert_eq!(app.client().call(&tool, "{}").await.status, 200);
        let tool_text = json!(tool);
        page.until(&format!("text('sessions').includes({}) && text('recent').includes({tool_text})", json!(NAME)))
            .await;
        page.until("text('sessions').includes('\u{fffd}drowssap\u{fffd}\u{fffd}')").await;
        page.show(&app).await;
        page.until(&format!("text('s-device') === {} && text('s-tools') === {tool_text}", json!(NAME))).await;
        page.until(&format!("text('s-recent').includes({tool_text})")).await;
        let key = page.config("Cursor").await["mcpServers"].as_object().unwrap().keys().next().unwrap().clone();
        assert!(key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'), "{key}");
        assert_eq!(
            page.chromium.eval("document.querySelectorAll('img, b, script:not(:last-of-type)').length").await,
            0
        );
        let sideways = "document.documentElement.scrollWidth <= innerWidth";
        assert_eq!(page.chromium.eval(sideways).await, true, "{width}");
        page.show(&long).await;
        assert_eq!(page.chromium.eval(sideways).await, true, "{width}");
    }
    // Whatever the script did, no text would become HTML, and no HTML a script.
    let sinks =
        "(() => { try { document.body.innerHTML = '<b>'; return 'set' } catch (error) { return error.name } })()";
    assert_eq!(page.chromium.eval(sinks).await, "TypeError");
    let reports = page.chromium.errors().len();
    let injected = "document.body.append(Object.assign(document.createElement('div'), { id: 'injected' })); \
        document.getElementById('injected').setAttribute('onclick', 'window.hacked = 1'); \
        document.getElementById('injected').click(); window.hacked";
    assert_eq!(
        page.chromium
            .eval(&format!("(() => {{ try {{ {injected} }} catch {{}} return window.hacked ?? null }})()"))
            .await,
        Value::Null
    );
    assert!(reports <= 1, "{:?}", page.chromium.errors());
    bridge.abort();
}

/// What a client is told to use must be of use: by URL as an SDK does, and by the program that Claude Desktop starts.
#[tokio::test]
async fn the_configurations_of_a_session_work() {
    let server = TestServer::start(&[ADMIN, ("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "canary-token")]).await;
    let mut page = Page::open(&server).await;
    for has_own_token in [false, true] {
        let registration = json!({
            "device_id": "d", "device_name": "Anna’s Desk", "tools": tools(&["echo"]), "want_mcp_token": has_own_token,
            "bridge_features": ["cancel"],
        });
        let app = App::register_as(&server, registration, "app-token").await;
        let token = if has_own_token { app.registration["mcp_token"].as_str().unwrap() } else { "canary-token" };
        let variable = if has_own_token { "SESSION_MCP_TOKEN" } else { "OPENCLAW_PROXY_OPENCLAW_TOKEN" };
        let _bridge = app.connect().await.echo();
        page.show(&app).await;
        page.until("text('s-device') === 'Anna’s Desk' && text('s-pill').startsWith('connected')").await;
        page.until("text('s-about').includes('cancel')").await;
        assert_eq!(page.chromium.text("s-note").await.contains("token of its own"), has_own_token);
        assert_eq!(page.chromium.text("s-url").await, app.mcp_url);

        let openclaw = page.config("OpenClaw").await;
        let server_config = &openclaw["mcp"]["servers"]["anna-s-desk"];
        assert_eq!(server_config["transport"], "streamable-http");
        assert_eq!(server_config["requestTimeoutMs"], 130_000);
        assert_eq!(server_config["headers"]["Authorization"], format!("Bearer ${{{variable}}}"));
        let code = page.config("Claude Code").await;
        let cursor = page.config("Cursor").await;
        let vs_code = page.config("VS Code").await;
        assert_eq!(code["mcpServers"]["anna-s-desk"]["type"], "http");
        let authorization = &cursor["mcpServers"]["anna-s-desk"]["headers"]["Authorization"];
        assert_eq!(*authorization, format!("Bearer ${{env:{variable}}}"));
        assert_eq!(vs_code["inputs"][0]["description"], variable);
        let urls = [
            &server_config["url"],
            &code["mcpServers"]["anna-s-desk"]["url"],
            &cursor["mcpServers"]["anna-s-desk"]["url"],
            &vs_code["servers"]["anna-s-desk"]["url"],
        ];
        for url in urls {
            assert_eq!(*url, app.mcp_url);
        }
        let url = urls[0].as_str().unwrap().to_owned();
        let http = StreamableHttpClientTransportConfig::with_uri(url).auth_header(token);
        let client = soon(().serve(StreamableHttpClientTransport::from_config(http))).await.unwrap();
        assert_eq!(soon(client.list_all_tools()).await.unwrap()[0].name, "echo");
        soon(client.cancel()).await.unwrap();

        let desktop = page.config("Claude Desktop").await["mcpServers"]["anna-s-desk"].clone();
        assert_eq!(desktop["command"], "/usr/local/bin/openclaw-mcp-stdio");
        let mut command = Command::new(env!("CARGO_BIN_EXE_openclaw-mcp-stdio"));
        command.env_clear().stderr(Stdio::null());
        for (name, value) in desktop["env"].as_object().unwrap() {
            command.env(name, value.as_str().unwrap().replace("<token>", token));
        }
        let client = soon(().serve(TokioChildProcess::new(command).unwrap())).await.unwrap();
        assert_eq!(soon(client.list_all_tools()).await.unwrap()[0].name, "echo");
        soon(client.cancel()).await.unwrap();

        // What is copied is what is shown.
        page.chromium.send("Page.bringToFront", json!({})).await;
        let may = json!({ "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": page.base });
        page.chromium.send("Browser.grantPermissions", may).await;
        page.click("[data-copy=s-code]").await;
        page.chromium.until("document.querySelector('[data-copy=s-code]').innerText === 'Copied'").await;
        let copied = page.chromium.eval("navigator.clipboard.readText()").await;
        assert_eq!(copied, page.chromium.text("s-code").await);
    }
    let text = page.chromium.eval("document.documentElement.outerHTML").await;
    assert!(!text.as_str().unwrap().contains("canary-token"), "a token is on the page");
    page.is_clean();
}

#[tokio::test]
async fn without_tokens_none_is_in_the_configurations_and_a_session_that_ends_is_said_to() {
    let server = TestServer::start(&[ADMIN]).await;
    let app = App::register(&server).await;
    let mut page = Page::open(&server).await;
    page.show(&app).await;
    for client in ["OpenClaw", "Claude Code", "Claude Desktop", "Cursor", "VS Code"] {
        let config = page.config(client).await.to_string();
        assert!(!config.to_lowercase().contains("token") && !config.contains("Authorization"), "{client}: {config}");
    }
    page.until("text('s-note').includes('No token is asked for') && text('s-note').includes('PUBLIC_URL')").await;
    app.delete().await;
    page.until("text('s-device') === 'This session is not there'").await;
}

/// The colours of all texts that can be seen against what is behind them, as WCAG 2 measures them: those below 4.5.
const FAINT: &str = r"(() => {
    const parse = colour => colour.match(/[\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
    const over = ([r, g, b, a = 1], below) => [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
    const behind = node => {
        if (!node) return [255, 255, 255];
        const colour = parse(getComputedStyle(node).backgroundColor);
        return colour.length === 4 && colour[3] === 0 ? behind(node.parentElement)
            : colour.length === 4 ? over(colour, behind(node.parentElement)) : colour;
    };
    const faint = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let seen = 0;
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !node.checkVisibility() || ['SCRIPT', 'STYLE'].includes(node.tagName)) continue;
        const style = getComputedStyle(node), back = behind(node);
        const front = over(parse(node instanceof SVGElement ? style.fill : style.color), back);
        const [a, b] = [light(front), light(back)].sort((a, b) => b - a);
        seen += 1;
        if ((a + .05) / (b + .05) < 4.5) faint.push([walker.currentNode.data, (a + .05) / (b + .05), node.className]);
    }
    return [seen, faint];
})()";

#[tokio::test]
async fn it_can_be_read_by_day_and_by_night_on_a_desk_and_on_a_phone() {
    let server = TestServer::start(&[
        ADMIN,
        ("MAX_CALLS_PER_SESSION", "1"),
        ("APP_TOKEN", "app-token"),
        ("OPENCLAW_TOKEN", "claw-token"),
    ])
    .await;
    let registration = json!({ "device_id": "d", "tools": tools(&["echo"]), "want_mcp_token": true });
    let app = App::register_as(&server, registration, "app-token").await;
    let token = app.registration["mcp_token"].as_str().unwrap().to_owned();
    let client = app.client().header("authorization", &format!("Bearer {token}"));
    // Good, bad and refused: every colour is there.
    client.call("echo", "{}").await;
    app.client().call("echo", "{}").await;
    let mut bridge = app.connect().await;
    let call = client.spawn_call("1", "echo", "{}");
    let (id, _, _) = bridge.invoked().await;
    client.call("echo", "{}").await;
    bridge.answer(&id, r#""ok":true,"content":1"#).await;
    soon(call).await.unwrap();
    let mut page = Page::open(&server).await;
    page.until("text('recent').includes('busy') && text('issues').includes('MAX_CALLS_PER_SESSION')").await;
    page.until("text('v-refused') === '1'").await;
    for (width, is_dark) in [(1440, false), (1440, true), (800, true), (360, false), (360, true)] {
        page.chromium.look(width, 900, is_dark).await;
        for hash in ["#/".to_owned(), format!("#/session/{}", app.id)] {
            page.chromium.eval(&format!("location.hash = '{hash}'")).await;
            // There is something to be seen of it: its texts may be there from the last time.
            page.until(&format!("({} || text('s-code')) && {FAINT}[0] > 20", hash == "#/")).await;
            let what = format!("{width} wide, dark: {is_dark}, {hash}");
            let fits = "document.documentElement.scrollWidth <= innerWidth";
            assert_eq!(page.chromium.eval(fits).await, true, "{what}");
            let measured = page.chromium.eval(FAINT).await;
            assert_eq!(measured[1], json!([]), "{what}");
            let back = page.chromium.eval("parseInt(getComputedStyle(document.body).backgroundColor.slice(4))").await;
            assert_eq!(back.as_u64() < Some(60), is_dark, "{what}: {back}");
        }
    }
    // Whoever does not see it is told what each thing is that can be used.
    let tree = page.chromium.send("Accessibility.getFullAXTree", json!({})).await;
    let nodes = tree["nodes"].as_array().unwrap();
    let usable = ["button", "link", "tab", "searchbox", "table", "region", "meter"];
    let usable = nodes.iter().filter(|node| usable.iter().any(|role| node["role"]["value"] == *role));
    let usable: Vec<&Value> = usable.filter(|node| node["ignored"] != true).collect();
    assert!(usable.len() > 10, "{usable:?}");
    assert!(usable.iter().all(|node| node["name"]["value"] != ""), "{usable:?}");
    page.is_clean();
}

#[tokio::test]
async fn a_page_whose_proxy_restarts_says_so_and_comes_back() {
    let server = TestServer::start(&[ADMIN]).await;
    let app = App::register(&server).await;
    let bridge = app.connect().await.echo();
    app.client().call("echo", "{}").await;
    let mut page = Page::open(&server).await;
    page.until("text('recent').includes('echo') && text('v-apps') === '1 of 1'").await;
    assert_eq!(page.chromium.eval("document.getElementById('lost').checkVisibility()").await, false);
    let (port, admin) = (server.port, page.base.trim_start_matches("http://").to_owned());
    bridge.abort();
    server.stopped().await;
    page.until("text('lost').includes('was lost at') && text('verdict') === 'Not connected to the proxy'").await;
    page.until("text('live') === 'Connection lost'").await;

    let server = TestServer::start_on(port, &[("ADMIN_LISTEN", &admin)]).await;
    page.until("text('live') === 'Live' && text('issues').includes('was restarted at')").await;
    page.until("text('v-apps') === '0 of 0' && text('recent').includes('No calls yet')").await;
    assert_eq!(page.chromium.eval("document.getElementById('lost').checkVisibility()").await, false);
    // And it is as live as it was.
    let app = App::register(&server).await;
    let bridge = app.connect().await.echo();
    app.client().call("slow", "{}").await;
    page.until("text('recent').includes('slow') && text('v-apps') === '1 of 1'").await;
    bridge.abort();
}

#[tokio::test]
async fn a_filter_finds_sessions_that_are_not_listed() {
    let server = TestServer::start(&[ADMIN]).await;
    let mut page = Page::open(&server).await;
    page.until("text('sessions-nothing') === 'No app has registered a session yet.'").await;
    for n in 0..205 {
        App::register_with(&server, json!({ "device_id": format!("Device {n}.") })).await;
    }
    page.until("text('sessions-note').includes('of 205 connected') && text('sessions-note').includes('200 shown')")
        .await;
    let listed = "[...document.querySelectorAll('#sessions a')].map(link => link.innerText)";
    let shown = page.chromium.eval(listed).await;
    let shown: Vec<&str> = shown.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let hidden = (0..205).map(|n| format!("Device {n}.")).find(|name| !shown.contains(&name.as_str())).unwrap();
    let typed = json!(hidden.to_uppercase());
    let typing = format!("filter.value = {typed}; filter.dispatchEvent(new Event('input'))");
    page.chromium.eval(&format!("(filter => {{ {typing} }})(document.getElementById('filter'))")).await;
    page.until(&format!("JSON.stringify({listed}) === {}", json!(json!([hidden]).to_string()))).await;
    page.until("text('sessions-note').includes('1 match')").await;
    page.is_clean();
}
