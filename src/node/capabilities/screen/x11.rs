//! Looking at an X display.

use std::os::fd::AsFd;
use std::time::Duration;

use image::RgbImage;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio_util::sync::CancellationToken;
use x11rb::connection::{Connection, RequestConnection};
use x11rb::image::{BitsPerPixel, ColorComponent, Image, ImageOrder, PixelLayout};
use x11rb::protocol::randr::{self, ConnectionExt as _};
use x11rb::protocol::xfixes::{self, ConnectionExt as _, GetCursorImageReply};
use x11rb::protocol::xproto::Screen;
use x11rb::reexports::x11rb_protocol::{parse_display::parse_display, xauth::get_auth};
use x11rb::rust_connection::{DefaultStream, PollMode, RustConnection, Stream};
use x11rb::utils::RawFdContainer;

use super::look::{Error, Monitor, choose};

/// How soon a server that does not answer is noticed to be wanted no more.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What the display of this number shows.
pub(super) fn capture(
    display: &str,
    index: u32,
    with_pointer: bool,
    stop: &CancellationToken,
) -> Result<RgbImage, Error> {
    let display = Display::open(display, stop)?;
    let monitor = display.monitor(index)?;
    let (x, y) = (i16::try_from(monitor.x)?, i16::try_from(monitor.y)?);
    let (width, height) = (u16::try_from(monitor.width)?, u16::try_from(monitor.height)?);
    let screen = display.screen();
    let (image, visual) = Image::get(&display.connection, screen.root, x, y, width, height)?;
    let visuals = screen.allowed_depths.iter().flat_map(|depth| &depth.visuals);
    let visual = visuals.into_iter().find(|candidate| candidate.visual_id == visual).ok_or("unknown visual")?;
    let mut picture = to_rgb(&image, PixelLayout::from_visual_type(*visual)?);
    if with_pointer && let Some(pointer) = display.pointer()? {
        let (x, y) = (i32::from(pointer.x) - i32::from(pointer.xhot), i32::from(pointer.y) - i32::from(pointer.yhot));
        draw(&mut picture, &pointer, x - monitor.x, y - monitor.y);
    }
    Ok(picture)
}

/// Where the display of this number is.
pub(super) fn monitor(display: &str, index: u32, stop: &CancellationToken) -> Result<Monitor, Error> {
    Display::open(display, stop)?.monitor(index)
}

/// A connection to an X server, and which of its screens is meant.
struct Display {
    connection: RustConnection<Stoppable>,
    screen: usize,
}

impl Display {
    fn open(name: &str, stop: &CancellationToken) -> Result<Self, Error> {
        let parsed = parse_display(Some(name))?;
        let mut error: Error = "it has no address".into();
        for address in parsed.connect_instruction() {
            match DefaultStream::connect(&address) {
                Ok((stream, (family, address))) => {
                    let (name, data) =
                        get_auth(family, &address, parsed.display).unwrap_or_default().unwrap_or_default();
                    let (stream, screen) = (Stoppable { stream, stop: stop.clone() }, usize::from(parsed.screen));
                    let connection = RustConnection::connect_to_stream_with_auth_info(stream, screen, name, data)?;
                    return Ok(Display { connection, screen });
                }
                Err(reason) => error = reason.into(),
            }
        }
        Err(error)
    }

    /// The screen; that it exists was checked when the connection was made.
    fn screen(&self) -> &Screen {
        &self.connection.setup().roots[self.screen]
    }

    fn monitor(&self, index: u32) -> Result<Monitor, Error> {
        let screen = self.screen();
        let whole =
            Monitor { x: 0, y: 0, width: screen.width_in_pixels.into(), height: screen.height_in_pixels.into() };
        if self.connection.extension_information(randr::X11_EXTENSION_NAME)?.is_none() {
            return Ok(whole);
        }
        self.connection.randr_query_version(1, 5)?.reply()?;
        let mut monitors = self.connection.randr_get_monitors(screen.root, true)?.reply()?.monitors;
        monitors.sort_by_key(|monitor| !monitor.primary);
        let visible = monitors.iter().filter_map(|monitor| {
            clip((monitor.x, monitor.y, monitor.width, monitor.height), (whole.width, whole.height))
        });
        Ok(choose(&visible.collect::<Vec<_>>(), index).unwrap_or(whole))
    }

    /// The pointer, if the server tells how it looks.
    fn pointer(&self) -> Result<Option<GetCursorImageReply>, Error> {
        if self.connection.extension_information(xfixes::X11_EXTENSION_NAME)?.is_none() {
            return Ok(None);
        }
        self.connection.xfixes_query_version(2, 0)?.reply()?;
        Ok(Some(self.connection.xfixes_get_cursor_image()?.reply()?))
    }
}

/// The part of a display that is on the desktop: what is beyond cannot be read.
fn clip((x, y, width, height): (i16, i16, u16, u16), desktop: (u32, u32)) -> Option<Monitor> {
    let part = |start: i16, length: u16, whole: u32| {
        let (start, end) = (i64::from(start).max(0), (i64::from(start) + i64::from(length)).min(whole.into()));
        let length = u32::try_from(end - start).ok().filter(|length| *length > 0)?;
        Some((i32::try_from(start).ok()?, length))
    };
    let ((x, width), (y, height)) = (part(x, width, desktop.0)?, part(y, height, desktop.1)?);
    Some(Monitor { x, y, width, height })
}

fn to_rgb(image: &Image<'_>, layout: PixelLayout) -> RgbImage {
    let (width, height) = (image.width(), image.height());
    let common = |shift| ColorComponent::new(8, shift).ok();
    let is_common = (image.bits_per_pixel(), image.byte_order()) == (BitsPerPixel::B32, ImageOrder::LsbFirst)
        && common(16).zip(common(8)).zip(common(0)).is_some_and(|((r, g), b)| layout == PixelLayout::new(r, g, b));
    if is_common {
        let bytes = image.data().chunks_exact(4).flat_map(|pixel| [pixel[2], pixel[1], pixel[0]]).collect();
        if let Some(picture) = RgbImage::from_raw(width.into(), height.into(), bytes) {
            return picture;
        }
    }
    RgbImage::from_fn(width.into(), height.into(), |x, y| {
        let (x, y) = (u16::try_from(x).unwrap_or(0), u16::try_from(y).unwrap_or(0));
        let (red, green, blue) = layout.decode(image.get_pixel(x, y));
        image::Rgb([red, green, blue].map(|component| component.to_be_bytes()[0]))
    })
}

/// Draws a pointer, whose colours are multiplied by its opacity already.
fn draw(picture: &mut RgbImage, pointer: &GetCursorImageReply, left: i32, top: i32) {
    let rows = pointer.cursor_image.chunks_exact(usize::from(pointer.width).max(1));
    for (y, row) in (top..).zip(rows) {
        for (x, argb) in (left..).zip(row) {
            let [alpha, red, green, blue] = argb.to_be_bytes();
            let place = u32::try_from(x).ok().zip(u32::try_from(y).ok());
            if let Some(pixel) = place.and_then(|(x, y)| picture.get_pixel_mut_checked(x, y)) {
                for (below, above) in pixel.0.iter_mut().zip([red, green, blue]) {
                    let shining = u16::from(*below) * u16::from(255 - alpha) / 255;
                    *below = above.saturating_add(u8::try_from(shining).unwrap_or(u8::MAX));
                }
            }
        }
    }
}

/// A connection whose waiting ends when nobody wants the answer any more.
struct Stoppable {
    stream: DefaultStream,
    stop: CancellationToken,
}

impl Stream for Stoppable {
    fn poll(&self, mode: PollMode) -> std::io::Result<()> {
        if self.stop.is_cancelled() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, mode.readable());
        flags.set(PollFlags::OUT, mode.writable());
        let interval = Timespec::try_from(POLL_INTERVAL).expect("it is short");
        // Nothing happened, or a signal came: then the caller finds nothing and polls again.
        let _ready = poll(&mut [PollFd::from_borrowed_fd(self.stream.as_fd(), flags)], Some(&interval));
        Ok(())
    }

    fn read(&self, buffer: &mut [u8], fds: &mut Vec<RawFdContainer>) -> std::io::Result<usize> {
        self.stream.read(buffer, fds)
    }

    fn write(&self, buffer: &[u8], fds: &mut Vec<RawFdContainer>) -> std::io::Result<usize> {
        self.stream.write(buffer, fds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::borrow::Cow;
    use x11rb::image::ScanlinePad;

    /// A picture of two red, green, blue and white pixels in rows of two, as a server would send it.
    fn colours(depth: u8, bits: BitsPerPixel, order: ImageOrder, widths: [u8; 3]) -> RgbImage {
        let [red, green, blue] = widths;
        let component = |width, shift| ColorComponent::new(width, shift).unwrap();
        let layout = PixelLayout::new(component(red, green + blue), component(green, blue), component(blue, 0));
        let mut image = Image::allocate(2, 4, ScanlinePad::Pad32, depth, bits, order);
        let colours = [(u16::MAX, 0, 0), (0, u16::MAX, 0), (0, 0, u16::MAX), (u16::MAX, u16::MAX, u16::MAX)];
        for (y, colour) in (0..).zip(colours) {
            for x in 0..2 {
                image.put_pixel(x, y, layout.encode(colour));
            }
        }
        to_rgb(&image, layout)
    }

    #[test]
    fn every_format_of_pixels_becomes_the_same_picture() {
        let colour = |y| image::Rgb([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]][y as usize]);
        let expected = RgbImage::from_fn(2, 4, |_, y| colour(y));
        for order in [ImageOrder::LsbFirst, ImageOrder::MsbFirst] {
            assert_eq!(colours(24, BitsPerPixel::B32, order, [8, 8, 8]), expected);
            assert_eq!(colours(24, BitsPerPixel::B24, order, [8, 8, 8]), expected);
            assert_eq!(colours(30, BitsPerPixel::B32, order, [10, 10, 10]), expected);
            assert_eq!(colours(16, BitsPerPixel::B16, order, [5, 6, 5]), expected);
            assert_eq!(colours(15, BitsPerPixel::B16, order, [5, 5, 5]), expected);
        }
    }

    #[test]
    fn only_what_is_on_the_desktop_can_be_seen() {
        let monitor = |x, y, width, height| Some(Monitor { x, y, width, height });
        for (place, part) in [
            ((0, 0, 800, 600), monitor(0, 0, 800, 600)),
            ((800, 0, 800, 600), monitor(800, 0, 200, 600)),
            ((-100, 590, 800, 600), monitor(0, 590, 700, 10)),
            ((1000, 0, 800, 600), None),
            ((0, 0, 0, 600), None),
        ] {
            assert_eq!(clip(place, (1000, 600)), part);
        }
    }

    #[test]
    fn a_pointer_is_blended_and_cut_at_the_edges() {
        let mut picture = RgbImage::from_pixel(3, 3, image::Rgb([100, 100, 100]));
        let pointer = GetCursorImageReply {
            width: 2,
            height: 2,
            cursor_image: vec![0xff_00_00_00, 0xff_ff_00_00, 0x80_00_80_00, 0],
            ..GetCursorImageReply::default()
        };
        draw(&mut picture, &pointer, 1, 1);
        let pixel = |picture: &RgbImage, x, y| picture.get_pixel(x, y).0;
        assert_eq!((pixel(&picture, 0, 0), pixel(&picture, 1, 1)), ([100; 3], [0; 3]));
        assert_eq!((pixel(&picture, 2, 1), pixel(&picture, 1, 2)), ([255, 0, 0], [49, 177, 49]));
        assert_eq!(pixel(&picture, 2, 2), [100; 3]);
        draw(&mut picture, &pointer, -1, -1);
        draw(&mut picture, &pointer, 2, 2);
        assert_eq!((pixel(&picture, 0, 0), pixel(&picture, 2, 2)), ([100; 3], [0; 3]));
    }

    #[test]
    fn the_borrowed_pixels_of_a_common_display_are_read_in_order() {
        let bytes = [3, 2, 1, 0, 6, 5, 4, 0];
        let image =
            Image::new(2, 1, ScanlinePad::Pad32, 24, BitsPerPixel::B32, ImageOrder::LsbFirst, Cow::Borrowed(&bytes));
        let component = |shift| ColorComponent::new(8, shift).unwrap();
        let layout = PixelLayout::new(component(16), component(8), component(0));
        assert_eq!(to_rgb(&image.unwrap(), layout).into_raw(), [1, 2, 3, 4, 5, 6]);
    }
}
