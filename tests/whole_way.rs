//! The whole way: a real MCP client, the proxy, a bridge, the node, and a real desktop.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::clients::{Client, OPENCLAW, TS_V2_MODERN, text};
use crate::node::Folder;
use crate::screen::{BLUE, Display, RED};
use crate::serve::{Serving, node};
use crate::support::TestServer;

/// The picture among what a client was given.
fn picture(step: &Value) -> image::RgbImage {
    let blocks = step["ok"]["content"].as_array().unwrap_or_else(|| panic!("{step}"));
    let block = blocks.iter().find(|block| block["type"] == "image").unwrap_or_else(|| panic!("{step}"));
    let bytes = BASE64_STANDARD.decode(block["data"].as_str().unwrap()).unwrap();
    image::load_from_memory(&bytes).unwrap().into_rgb8()
}

async fn use_the_desktop(client: Client) {
    let server = TestServer::start(&[("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")]).await;
    let display = Display::start(640, 480, 24);
    let folder = Folder::new();
    folder.write("settings.json", r#"{"NodeTtsEnabled":true}"#);
    let spoken = folder.path("spoken");
    let (code, said, error) = node(&folder, &["approvals", "allow", "uname"]).await;
    assert_eq!(code, 0, "{said}{error}");
    let args = ["--proxy-url", &*server.base, "--lend", "system.run,tts.*", "--tts-output-dir", &*spoken];
    let env = [
        ("OPENCLAW_PROXY_APP_TOKEN", "app-token"),
        ("DISPLAY", &*display.name),
        ("WAYLAND_DISPLAY", ""),
        ("RUST_LOG", "debug"),
    ];
    let mut serving = Serving::start_in(folder, &args, &env).await;
    let session = serving.node.line().await;
    serving.node.logged("bridge connected").await;

    let page = "<body style='margin:0;background:#00f'><h1>Canvas</h1>";
    let plan = json!({
        "url": session["mcp_url"],
        "headers": { "Authorization": "Bearer claw-token" },
        "timeout_ms": 60_000,
        "steps": [
            ["list"],
            ["call", "screen.snapshot", {}],
            ["call", "system.run", { "command": ["uname", "-s"] }],
            ["call", "system.run", { "command": ["id"] }],
            ["call", "tts.speak", { "text": "Hello from the node." }],
            ["call", "canvas.present", { "html": page, "width": 400, "height": 300 }],
            ["call", "canvas.eval", { "script": "document.querySelector('h1').textContent" }],
            ["call", "canvas.snapshot", {}],
        ],
    });
    let report = client.run(plan).await;
    let steps = report["steps"].as_array().unwrap_or_else(|| panic!("{report}"));
    let listed = steps[0]["ok"].to_string();
    assert!(listed.contains("snapshot") && !listed.contains("app.") && !listed.contains("camera.snap"), "{listed}");

    let screen = picture(&steps[1]);
    assert_eq!(screen.dimensions(), (640, 480));
    assert_eq!((screen.get_pixel(10, 10).0, screen.get_pixel(10, 470).0), (RED, BLUE));
    assert!(!text(&steps[1]).contains("base64"), "{}", steps[1]);
    assert!(text(&steps[2]).contains("Linux"), "{}", steps[2]);
    assert!(text(&steps[3]).contains("exec-approvals-v2: UserDenied"), "{}", steps[3]);
    assert!(text(&steps[4]).contains("durationMs"), "{}", steps[4]);
    let files: Vec<_> = std::fs::read_dir(&spoken).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 1);
    assert!(std::fs::read(&files[0]).unwrap().starts_with(b"RIFF"));
    assert!(text(&steps[5]).contains("presented"), "{}\n{}", steps[5], serving.node.log());
    assert!(text(&steps[6]).contains("Canvas"), "{}", steps[6]);
    let canvas = picture(&steps[7]);
    let (width, height) = canvas.dimensions();
    assert_eq!(canvas.get_pixel(width - 5, height - 5).0, BLUE, "{width}x{height}");
}

#[tokio::test]
async fn a_client_uses_the_desktop() {
    use_the_desktop(TS_V2_MODERN).await;
}

#[tokio::test]
#[ignore = "OpenClaw is a large install: tests/run --heavy"]
async fn openclaw_uses_the_desktop() {
    use_the_desktop(OPENCLAW).await;
}
