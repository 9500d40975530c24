//! The node's screen, through its local MCP server: a real X server, and the real ffmpeg.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use image::RgbImage;
use openclaw_mcp_proxy::node::capabilities::Exposure;
use openclaw_mcp_proxy::node::capabilities::screen::{self, Screen};
use serde_json::{Value, json};
use x11rb::connection::Connection;
use x11rb::protocol::randr::{ConnectionExt as _, MonitorInfo};
use x11rb::protocol::xproto::{ChangeWindowAttributesAux, ConnectionExt as _, CreateGCAux, Cursor, Rectangle, Window};
use x11rb::rust_connection::RustConnection;
use x11rb::wrapper::ConnectionExt as _;

use crate::local_mcp::Local;
use crate::support::{McpClient, Reply, soon, timed, until};

pub const RED: [u8; 3] = [255, 0, 0];
const GREEN: [u8; 3] = [0, 255, 0];
pub const BLUE: [u8; 3] = [0, 0, 255];
pub const WHITE: [u8; 3] = [255, 255, 255];
/// The colour of the pointer, which is nowhere else.
const YELLOW: [u8; 3] = [255, 255, 0];

/// An X server of one test.
pub struct Display {
    pub name: String,
    server: Child,
    connection: RustConnection,
    root: Window,
}

impl Display {
    /// Starts one whose quarters are red, green, blue and white.
    pub fn start(width: u16, height: u16, depth: u8) -> Self {
        let mut command = Command::new("Xvfb");
        command.args(["-displayfd", "1", "-screen", "0", &format!("{width}x{height}x{depth}"), "-nolisten", "tcp"]);
        let server = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut server = server.expect("Xvfb is missing; install the Debian package xvfb");
        let mut number = String::new();
        BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut number).unwrap();
        let name = format!(":{}", number.trim());
        let (connection, _) = x11rb::connect(Some(&name)).unwrap();
        let root = connection.setup().roots[0].root;
        let display = Display { name, server, connection, root };
        let (half_width, half_height) = (width / 2, height / 2);
        let colours = if depth == 16 { [0xf800, 0x07e0, 0x001f, 0xffff] } else { [0xff0000, 0xff00, 0xff, 0xffffff] };
        for (place, colour) in [(0, 0), (1, 0), (0, 1), (1, 1)].into_iter().zip(colours) {
            let (x, y) = (place.0 * half_width, place.1 * half_height);
            let quarter =
                Rectangle { x: x as i16, y: y as i16, width: width - half_width, height: height - half_height };
            let gc = display.connection.generate_id().unwrap();
            let paint = CreateGCAux::new().foreground(colour);
            display.connection.create_gc(gc, root, &paint).unwrap();
            display.connection.poly_fill_rectangle(root, gc, &[quarter]).unwrap();
        }
        display.sync();
        display
    }

    /// Makes the pointer a yellow square and puts its upper left corner there.
    fn point_at(&self, x: i16, y: i16) {
        let (connection, root) = (&self.connection, self.root);
        let (pixmap, gc) = (connection.generate_id().unwrap(), connection.generate_id().unwrap());
        let cursor: Cursor = connection.generate_id().unwrap();
        connection.create_pixmap(1, pixmap, root, 16, 16).unwrap();
        connection.create_gc(gc, pixmap, &CreateGCAux::new().foreground(1)).unwrap();
        let square = Rectangle { x: 0, y: 0, width: 16, height: 16 };
        connection.poly_fill_rectangle(pixmap, gc, &[square]).unwrap();
        connection.create_cursor(cursor, pixmap, pixmap, u16::MAX, u16::MAX, 0, 0, 0, 0, 0, 0).unwrap();
        let look = ChangeWindowAttributesAux::new().cursor(cursor);
        connection.change_window_attributes(root, &look).unwrap();
        connection.warp_pointer(x11rb::NONE, root, 0, 0, 0, 0, x, y).unwrap();
        self.sync();
    }

    /// Splits the display into monitors; the last one is the primary one.
    fn split(&self, monitors: &[(i16, i16, u16, u16)]) {
        for (number, &(x, y, width, height)) in monitors.iter().enumerate() {
            let name = self.connection.intern_atom(false, format!("part-{number}").as_bytes()).unwrap();
            let name = name.reply().unwrap().atom;
            let primary = number + 1 == monitors.len();
            let monitor = MonitorInfo { name, primary, x, y, width, height, ..MonitorInfo::default() };
            self.connection.randr_set_monitor(self.root, monitor).unwrap();
        }
        self.sync();
    }

    fn sync(&self) {
        self.connection.sync().unwrap();
    }

    fn signal(&self, signal: &str) {
        let pid = self.server.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }
}

/// A local MCP server that lends the screen of a display.
async fn lend_screen(display: &str) -> (Local, McpClient) {
    let local = Local::start().await;
    let options = screen::Options { display: Some(display.to_owned()) };
    local.registry.add(Screen::new(options), Exposure::Everywhere);
    let client = McpClient::new(&local.url);
    (local, client)
}

pub fn payload(reply: &Reply) -> Value {
    assert!(!reply.is_tool_error(), "{}", reply.tool_text());
    serde_json::from_str(&reply.tool_text()).unwrap()
}

pub async fn failure(client: &McpClient, command: &str, args: &str) -> String {
    let reply = client.call(command, args).await;
    assert!(reply.is_tool_error(), "{}", reply.text);
    reply.tool_text()
}

pub fn bytes(payload: &Value) -> Vec<u8> {
    BASE64_STANDARD.decode(payload["base64"].as_str().unwrap()).unwrap()
}

/// The picture in a payload; it must be as large as the payload says.
pub fn picture(payload: &Value) -> RgbImage {
    let format = match payload["format"].as_str().unwrap() {
        "png" => image::ImageFormat::Png,
        "jpeg" => image::ImageFormat::Jpeg,
        other => panic!("{other}"),
    };
    let picture = image::load_from_memory_with_format(&bytes(payload), format).unwrap().into_rgb8();
    assert_eq!(json!([picture.width(), picture.height()]), json!([payload["width"], payload["height"]]));
    picture
}

pub fn assert_near(picture: &RgbImage, x: u32, y: u32, colour: [u8; 3], tolerance: u8) {
    let pixel = picture.get_pixel(x, y).0;
    assert!(pixel.iter().zip(colour).all(|(a, b)| a.abs_diff(b) <= tolerance), "{pixel:?} at {x},{y}");
}

/// Whether the middles of the quarters have their colours.
fn assert_quarters(picture: &RgbImage, tolerance: u8) {
    let (x, y) = (picture.width() / 4, picture.height() / 4);
    for (column, row, colour) in [(1, 1, RED), (3, 1, GREEN), (1, 3, BLUE), (3, 3, WHITE)] {
        assert_near(picture, x * column, y * row, colour, tolerance);
    }
}

/// What ffprobe says of a video, which it decodes as a whole.
pub fn probe(payload: &Value, name: &str) -> Value {
    let file = std::env::temp_dir().join(format!("openclaw-test-{}-{name}.mp4", std::process::id()));
    std::fs::write(&file, bytes(payload)).unwrap();
    let mut command = Command::new("ffprobe");
    command.args(["-v", "error", "-count_frames", "-show_format", "-show_streams", "-of", "json"]).arg(&file);
    let probed = command.output().expect("ffprobe is missing; install the Debian package ffmpeg");
    std::fs::remove_file(file).unwrap();
    assert!(probed.status.success() && probed.stderr.is_empty(), "{}", String::from_utf8_lossy(&probed.stderr));
    serde_json::from_slice(&probed.stdout).unwrap()
}

pub fn duration(probed: &Value) -> f64 {
    probed["format"]["duration"].as_str().unwrap().parse().unwrap()
}

/// The arguments of the running ffmpeg that has `marker` among them.
fn running(marker: &str) -> Option<Vec<String>> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut arguments = processes.filter_map(|process| {
        let line = std::fs::read(process.path().join("cmdline")).ok()?;
        Some(line.split(|byte| *byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect::<Vec<_>>())
    });
    arguments.find(|arguments| arguments[0].ends_with("ffmpeg") && arguments.iter().any(|arg| arg == marker))
}

async fn cancel(client: &McpClient, id: &str) {
    let body = format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);
    assert_eq!(client.post(&body).await.status, 204);
}

/// Cancels a call while its ffmpeg runs; neither the process nor its file may be left.
pub async fn assert_ends_when_cancelled(client: &McpClient, command: &str, args: &str, marker: &str) {
    let call = client.spawn_call("\"c\"", command, args);
    until(async || running(marker).is_some()).await;
    let file = PathBuf::from(running(marker).unwrap().into_iter().rfind(|arg| arg.ends_with(".mp4")).unwrap());
    until(async || file.exists()).await;
    let since = Instant::now();
    cancel(client, "\"c\"").await;
    let reply = soon(call).await.unwrap();
    assert_eq!((reply.is_tool_error(), &*reply.tool_text()), (true, "cancelled"));
    until(async || running(marker).is_none() && !file.parent().unwrap().exists()).await;
    assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
}

#[tokio::test]
async fn a_snapshot_shows_what_is_on_the_display() {
    let display = Display::start(640, 481, 24);
    let (_local, client) = lend_screen(&display.name).await;
    let reply = client.call("screen.snapshot", r#"{"includePointer":false}"#).await;
    let shown = payload(&reply);
    let seen = picture(&shown);
    assert_eq!((seen.dimensions(), &shown["format"]), ((640, 481), &json!("png")));
    assert_quarters(&seen, 0);
    assert_eq!(shown["image"], format!("data:image/png;base64,{}", shown["base64"].as_str().unwrap()));
    // Clients that can show pictures find it after the text.
    let item = json!({ "type": "image", "data": shown["base64"], "mimeType": "image/png" });
    assert_eq!(reply.json()["result"]["content"][1], item);

    for (args, size) in [
        (r#"{"format":" JPG "}"#, (640, 481)),
        (r#"{"format":"jpeg","quality":500}"#, (640, 481)),
        (r#"{"format":"jpeg","maxWidth":320,"quality":"best"}"#, (320, 240)),
        (r#"{"maxWidth":321}"#, (321, 241)),
        (r#"{"maxWidth":-3}"#, (16, 12)),
        (r#"{"maxWidth":99999,"screenIndex":99}"#, (640, 481)),
    ] {
        let shown = payload(&client.call("screen.snapshot", args).await);
        let seen = picture(&shown);
        assert_eq!(seen.dimensions(), size, "{args}");
        assert_quarters(&seen, 8);
        let mime_type = format!("data:image/{};base64,", shown["format"].as_str().unwrap());
        assert!(shown["image"].as_str().unwrap().starts_with(&mime_type));
    }
    picture(&payload(&client.call("screen.snapshot", r#"{"format":"jpeg","quality":-3}"#).await));
    let says = "Unsupported screen snapshot format: use png or jpeg";
    assert_eq!(failure(&client, "screen.snapshot", r#"{"format":"svg"}"#).await, says);
}

#[tokio::test]
async fn the_pointer_is_shown_unless_it_is_not_wanted() {
    let display = Display::start(320, 240, 24);
    let (_local, client) = lend_screen(&display.name).await;
    display.point_at(40, 50);
    let with = picture(&payload(&client.call("screen.snapshot", "{}").await));
    let without = picture(&payload(&client.call("screen.snapshot", r#"{"includePointer":false}"#).await));
    for (x, y, colour) in [(40, 50, YELLOW), (55, 65, YELLOW), (39, 50, RED), (40, 49, RED), (56, 65, RED)] {
        assert_near(&with, x, y, colour, 0);
        assert_near(&without, x, y, RED, 0);
    }
}

#[tokio::test]
async fn each_monitor_has_a_number_and_the_primary_one_is_the_first() {
    let display = Display::start(400, 200, 24);
    display.split(&[(0, 0, 200, 200), (200, 100, 200, 100)]);
    let (_local, client) = lend_screen(&display.name).await;
    display.point_at(210, 110);
    for (args, size, colour) in [
        ("{}", (200, 100), WHITE),
        (r#"{"monitor":1}"#, (200, 200), RED),
        (r#"{"monitor":0,"screenIndex":1}"#, (200, 200), RED),
        (r#"{"screenIndex":7}"#, (200, 100), WHITE),
    ] {
        let seen = picture(&payload(&client.call("screen.snapshot", args).await));
        assert_eq!(seen.dimensions(), size, "{args}");
        assert_near(&seen, 5, 5, colour, 0);
        if colour == WHITE {
            assert_near(&seen, 12, 12, YELLOW, 0);
        }
    }
    let args = r#"{"durationMs":300,"screenIndex":1}"#;
    let recorded = payload(&client.call("screen.record", args).await);
    assert_eq!(recorded["screenIndex"], 1);
    let stream = probe(&recorded, "monitor")["streams"][0].clone();
    assert_eq!((&stream["width"], &stream["height"]), (&json!(200), &json!(200)));
}

#[tokio::test]
async fn a_display_with_few_colours_is_read_as_well() {
    let display = Display::start(101, 50, 16);
    let (_local, client) = lend_screen(&display.name).await;
    let seen = picture(&payload(&client.call("screen.snapshot", "{}").await));
    assert_eq!(seen.dimensions(), (101, 50));
    assert_quarters(&seen, 0);
}

#[tokio::test]
async fn a_display_that_does_not_answer_holds_nobody_up() {
    let display = Display::start(320, 240, 24);
    let (_local, client) = lend_screen(&display.name).await;
    display.signal("-STOP");
    let call = client.spawn_call("\"s\"", "screen.snapshot", "{}");
    tokio::time::sleep(Duration::from_millis(200)).await;
    cancel(&client, "\"s\"").await;
    let (reply, took) = timed(soon(call)).await;
    assert_eq!(reply.unwrap().tool_text(), "cancelled");
    assert!(took < Duration::from_secs(2), "{took:?}");
    // Whoever waits to the end is told, and then the next one gets its turn.
    assert_eq!(failure(&client, "screen.snapshot", "{}").await, "Capture failed");
    display.signal("-CONT");
    assert_quarters(&picture(&payload(&client.call("screen.snapshot", "{}").await)), 0);
}

#[tokio::test]
async fn without_a_display_there_is_nothing_to_lend() {
    let (_local, client) = lend_screen("").await;
    let listed = client.rpc("1", "tools/list", "{}").await.json()["result"]["tools"].clone();
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert!(!names.iter().any(|name| name.starts_with("screen.")), "{names:?}");
    assert_eq!(failure(&client, "screen.snapshot", "{}").await, "Screen capture not available");
    assert_eq!(failure(&client, "screen.record", "{}").await, "Screen recording not available");
    // A display that is gone is another thing.
    let (_local, client) = lend_screen(":98765").await;
    let listed = client.rpc("1", "tools/list", "{}").await.text;
    assert!(screen::COMMANDS.iter().all(|command| listed.contains(command)));
    assert_eq!(failure(&client, "screen.snapshot", "{}").await, "Capture failed");
    assert_eq!(failure(&client, "screen.record", "{}").await, "Recording failed");
}

#[tokio::test]
async fn a_recording_is_a_video_of_the_display() {
    // Odd, which the video must not be.
    let display = Display::start(321, 241, 24);
    let (_local, client) = lend_screen(&display.name).await;
    let (reply, took) = timed(client.call("screen.record", r#"{"durationMs":1000,"fps":20}"#)).await;
    assert!(took >= Duration::from_secs(1), "{took:?}");
    let recorded = payload(&reply);
    let expected =
        json!({ "format": "mp4", "durationMs": 1000, "fps": 20, "screenIndex": 0, "hasAudio": false, "base64": "" });
    let mut facts = recorded.clone();
    facts["base64"] = "".into();
    assert_eq!(facts, expected);
    let probed = probe(&recorded, "screen");
    let streams = probed["streams"].as_array().unwrap();
    let facts = ["codec_name", "pix_fmt", "width", "height", "r_frame_rate"].map(|name| &streams[0][name]);
    assert_eq!((streams.len(), json!(facts)), (1, json!(["h264", "yuv420p", 320, 240, "20/1"])));
    assert!((duration(&probed) - 1.0).abs() < 0.11, "{probed}");
    // It begins to play before all of it is there.
    let file = bytes(&recorded);
    let place = |atom: &[u8]| file.windows(4).position(|bytes| bytes == atom).unwrap();
    assert!(place(b"moov") < place(b"mdat"));

    for (args, fps, frames) in [
        (r#"{"durationMs":-3,"fps":"fast","format":"MP4"}"#, json!(10), 1),
        (r#"{"durationMs":200,"fps":1000}"#, json!(60), 12),
        (r#"{"durationMs":100,"fps":0}"#, json!(1), 1),
    ] {
        let recorded = payload(&client.call("screen.record", args).await);
        assert_eq!(recorded["fps"], fps, "{args}");
        let probed = probe(&recorded, "clamped");
        assert_eq!(probed["streams"][0]["nb_read_frames"], frames.to_string(), "{args}");
    }
    let says = "Unsupported screen recording format: use mp4";
    assert_eq!(failure(&client, "screen.record", r#"{"format":"webm"}"#).await, says);
}

#[tokio::test]
async fn a_cancelled_recording_leaves_nothing_behind() {
    let display = Display::start(320, 240, 24);
    let (_local, client) = lend_screen(&display.name).await;
    assert_ends_when_cancelled(&client, "screen.record", r#"{"durationMs":60000}"#, &display.name).await;
}
