//! `canvas.*`: a window that agents show things in, and look at themselves.
//!
//! Its content is drawn by a browser of our own, which is steered with the DevTools protocol and starts when something
//! is first shown. What is shown is not trusted: it is a web page, with no more rights than one.

mod a2ui;
mod browser;
mod cdp;
mod jsonl_file;
mod owner;
mod page;
mod schema;

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};
use url::Url;

use super::{Args, Capability, Request, Response};
use owner::{Content, Job, Order, Owner};

/// The commands, in the order in which they are listed.
const COMMANDS: [&str; 10] = [
    "canvas.present",
    "canvas.hide",
    "canvas.navigate",
    "canvas.eval",
    "canvas.snapshot",
    "canvas.a2ui.push",
    "canvas.a2ui.pushJSONL",
    "canvas.a2ui.reset",
    "canvas.a2ui.dump",
    "canvas.caps",
];
/// The most orders that wait for the canvas.
const MAX_ORDERS: usize = 16;
/// What there is nothing to show with.
const NOT_AVAILABLE: &str = "CANVAS_NOT_AVAILABLE: no browser is installed on this node";

/// How the canvas is shown. The default suits every desktop.
#[derive(Debug, Clone)]
pub struct Options {
    /// The browser, one that is built on Chromium; the first that is found, if it is not given.
    pub program: Option<PathBuf>,
    /// Whether no window is shown; if it is not given, none is if there is no screen.
    pub headless: Option<bool>,
    /// The folder in which each browser has a folder of its own; the system's folder for such things, if it is not
    /// given.
    pub profiles: Option<PathBuf>,
    /// How the browser is steered.
    pub link: Link,
    /// How long a script of `canvas.eval` may take.
    pub script_timeout: Duration,
    /// Whether pages may reach this computer and its private network by address. Whoever steers the canvas from
    /// elsewhere could read through it what only this computer can reach.
    pub reaches_private_network: bool,
}

impl Default for Options {
    fn default() -> Self {
        #[cfg(unix)]
        let link = Link::Pipe;
        #[cfg(not(unix))]
        let link = Link::Port;
        Options {
            program: None,
            headless: None,
            profiles: None,
            link,
            script_timeout: Duration::from_secs(15),
            reaches_private_network: true,
        }
    }
}

/// How a browser is steered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// Through pipes, which nobody else can reach.
    #[cfg(unix)]
    Pipe,
    /// Through a port of this machine, which its other users can reach, too.
    Port,
}

/// The capability.
#[derive(Debug)]
pub struct Canvas {
    options: Options,
    /// The task that owns the canvas, once there was something to do.
    orders: OnceLock<mpsc::Sender<Job>>,
    closing: CancellationToken,
    /// Ends that task, and the browser with it.
    _end: DropGuard,
}

/// A place and size of the canvas.
#[derive(Debug, Clone)]
struct Frame {
    width: i32,
    height: i32,
    /// From the left; centred, if it is not given.
    x: Option<i32>,
    /// From the top; centred, if it is not given.
    y: Option<i32>,
    title: String,
}

impl Default for Frame {
    fn default() -> Self {
        Frame { width: 800, height: 600, x: None, y: None, title: "Canvas".to_owned() }
    }
}

impl Frame {
    fn read(args: &Args) -> Self {
        let default = Frame::default();
        let size = |name, default| args.int(name).unwrap_or(default).clamp(100, 7680);
        let place = |name| args.int(name).filter(|place| *place != -1).map(|place| place.clamp(-16384, 16384));
        Frame {
            width: size("width", default.width),
            height: size("height", default.height),
            x: place("x"),
            y: place("y"),
            title: args.string("title").map_or(default.title, str::to_owned),
        }
    }
}

/// A picture to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Picture {
    format: Format,
    max_width: i32,
    /// From 1 to 100; of JPEG alone.
    quality: i32,
}

/// How a picture is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Png,
    Jpeg,
}

impl Format {
    fn name(self) -> &'static str {
        match self {
            Format::Png => "png",
            Format::Jpeg => "jpeg",
        }
    }
}

impl Picture {
    fn read(args: &Args) -> Option<Self> {
        let format = match &*args.string("format").unwrap_or("png").trim().to_ascii_lowercase() {
            "png" => Format::Png,
            "jpeg" | "jpg" => Format::Jpeg,
            _ => return None,
        };
        let max_width = args.int("maxWidth").unwrap_or(1200).clamp(32, 7680);
        Some(Picture { format, max_width, quality: args.int("quality").unwrap_or(80).clamp(1, 100) })
    }
}

/// Why an order was not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum Trouble {
    #[error("no browser is installed")]
    NotFound,
    #[error("the browser cannot be started")]
    NotStarted,
    #[error("nothing is shown")]
    NotOpen,
    #[error("the browser has ended")]
    Gone,
    #[error("the page did not answer in time")]
    Late,
    #[error("the browser refused")]
    Refused,
}

impl Canvas {
    /// A canvas. Nothing is started before something is to be shown.
    pub fn new(options: Options) -> Self {
        let closing = CancellationToken::new();
        Canvas { options, orders: OnceLock::new(), _end: closing.clone().drop_guard(), closing }
    }

    fn has_browser(&self) -> bool {
        browser::program(&self.options).is_some()
    }

    /// Has an order carried out by the task that owns the canvas.
    async fn order(&self, order: Order, cancel: CancellationToken) -> Response {
        let orders = self.orders.get_or_init(|| {
            let (orders, received) = mpsc::channel(MAX_ORDERS);
            // It outlives this by what it takes to end the browser.
            tokio::spawn(Owner::new(self.options.clone()).run(received, self.closing.clone()));
            orders
        });
        let (reply, replied) = oneshot::channel();
        let job = Job { order, cancel: cancel.clone(), reply };
        let done = async {
            orders.send(job).await.ok()?;
            replied.await.ok()
        };
        match cancel.run_until_cancelled(done).await {
            Some(response) => response.unwrap_or_else(|| Response::failed(NOT_AVAILABLE)),
            None => Response::failed("cancelled"),
        }
    }

    async fn present(&self, args: &Args, cancel: CancellationToken) -> Response {
        let given = |name| args.string(name).filter(|text| !text.is_empty());
        let content = match (given("url"), given("html")) {
            (Some(url), _) => match address(url) {
                Ok(url) => Some(Content::Url(url)),
                Err(error) => return Response::failed(error),
            },
            (None, html) => html.map(|html| Content::Html(html.to_owned())),
        };
        self.order(Order::Present(content, Frame::read(args)), cancel).await
    }

    async fn navigate(&self, args: &Args, cancel: CancellationToken) -> Response {
        match args.string("url").filter(|url| !url.is_empty()).map(address) {
            Some(Ok(url)) => self.order(Order::Navigate(url), cancel).await,
            Some(Err(error)) => Response::failed(error),
            None => Response::failed("Missing url parameter"),
        }
    }

    async fn eval(&self, args: &Args, cancel: CancellationToken) -> Response {
        match ["script", "javaScript", "javascript"].into_iter().find_map(|name| args.string(name)) {
            None | Some("") => Response::failed("Missing script parameter"),
            Some(script) => self.order(Order::Eval(script.to_owned()), cancel).await,
        }
    }

    async fn snapshot(&self, args: &Args, cancel: CancellationToken) -> Response {
        match Picture::read(args) {
            Some(picture) => self.order(Order::Snapshot(picture), cancel).await,
            None => Response::failed("Unsupported canvas snapshot format. Supported formats: png, jpeg"),
        }
    }

    async fn push(&self, args: &Args, cancel: CancellationToken) -> Response {
        let given = |name| args.string(name).filter(|text| !text.trim().is_empty());
        let read;
        let jsonl = match (given("jsonl"), given("jsonlPath")) {
            (Some(jsonl), _) => jsonl,
            (None, Some(path)) => match jsonl_file::read(path.to_owned()).await {
                Ok(text) => {
                    read = text;
                    &read
                }
                Err(error) => {
                    tracing::debug!(%error, "jsonlPath");
                    return Response::failed("Failed to read jsonlPath");
                }
            },
            (None, None) => return Response::failed("Missing jsonl or jsonlPath parameter"),
        };
        let props = args.get("props").filter(|props| props.is_object()).cloned();
        match a2ui::Push::parse(jsonl, props) {
            Ok(push) => self.order(Order::Push(push), cancel).await,
            Err(error) => Response::failed(error),
        }
    }

    async fn dump(&self, cancel: CancellationToken) -> Response {
        if !self.has_browser() {
            return Response::failed("CANVAS_NOT_OPEN: no browser is installed on this node");
        }
        self.order(Order::Dump, cancel).await
    }

    fn caps(&self) -> Response {
        let can = self.has_browser();
        Response::done(json!({
            "renderer": if can { "web" } else { "none" },
            "eval": can,
            "snapshot": can,
            "navigate": can,
            "a2ui": { "version": a2ui::VERSION, "push": can, "reset": can, "introspect": can },
        }))
    }
}

impl Capability for Canvas {
    fn category(&self) -> &str {
        "canvas"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn is_available(&self, command: &str) -> bool {
        command == "canvas.caps" || self.has_browser()
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        schema::of(command)
    }

    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            let Request { command, args, .. } = request;
            match &*command {
                "canvas.present" => self.present(&args, cancel).await,
                "canvas.hide" => self.order(Order::Hide, cancel).await,
                "canvas.navigate" => self.navigate(&args, cancel).await,
                "canvas.eval" => self.eval(&args, cancel).await,
                "canvas.snapshot" => self.snapshot(&args, cancel).await,
                "canvas.a2ui.push" | "canvas.a2ui.pushJSONL" => self.push(&args, cancel).await,
                "canvas.a2ui.reset" => self.order(Order::Reset, cancel).await,
                "canvas.a2ui.dump" => self.dump(cancel).await,
                "canvas.caps" => self.caps(),
                other => Response::unknown_command(other),
            }
        })
    }
}

/// An address that may be shown: the web's, and nothing that would open a file or another program, or hide a password.
fn address(text: &str) -> Result<Url, String> {
    let url = Url::parse(text.trim()).map_err(|_| "Invalid url: it is not an absolute URL")?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err("Invalid url: only http and https are shown".to_owned());
    }
    if !url.has_host() {
        return Err("Invalid url: it has no host".to_owned());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("Invalid url: it must not hold a user name or password".to_owned());
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_as_they_are_understood() {
        for (text, canonical) in [
            ("HTTP://Example.COM:80/a b?q#f", "http://example.com/a%20b?q#f"),
            (" https://example.com ", "https://example.com/"),
            ("https://[::1]:8443/x", "https://[::1]:8443/x"),
            ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ] {
            assert_eq!(address(text).unwrap().as_str(), canonical);
        }
        for text in
            ["", "/", "page.html", "ftp://example.com/", "http://", "http://a:b@example.com/", "view-source:http://a/"]
        {
            assert!(address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn places_and_pictures_are_read_within_their_bounds() {
        let frame = |args| {
            let Frame { width, height, x, y, title } = Frame::read(&Args::new(args));
            (width, height, x, y, title)
        };
        let canvas = || "Canvas".to_owned();
        assert_eq!(frame(Value::Null), (800, 600, None, None, canvas()));
        let far = json!({ "width": 1, "height": 99999, "x": -99999, "y": 99999, "title": "T" });
        assert_eq!(frame(far), (100, 7680, Some(-16384), Some(16384), "T".to_owned()));
        let odd = json!({ "width": "9", "height": 300.0, "x": -1, "y": 0, "title": 7 });
        assert_eq!(frame(odd), (800, 600, None, Some(0), canvas()));
        let picture = |args| Picture::read(&Args::new(args));
        let default = Picture { format: Format::Png, max_width: 1200, quality: 80 };
        assert_eq!(picture(Value::Null), Some(default));
        let extreme = json!({ "format": " JPG ", "maxWidth": 1, "quality": 101 });
        assert_eq!(picture(extreme), Some(Picture { format: Format::Jpeg, max_width: 32, quality: 100 }));
        assert_eq!(picture(json!({ "format": "svg" })), None);
    }
}
