// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package rtlink

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Subscribe calls changed for every link of a namespace that comes, changes or goes, until the context ends or the kernel
// has dropped events, when it returns why. An empty path is the calling thread's namespace. ready is called once events
// are received: what is listed after that misses nothing.
func Subscribe(ctx context.Context, path string, ready func(), changed func(netlink.Link)) error {
	// lost holds the last error; the library's receiver ends after a failed receive and closes updates.
	lost := make(chan error, 1)
	opts := netlink.LinkSubscribeOptions{ErrorCallback: func(err error) {
		select {
		case lost <- err:
		default:
		}
	}}
	if path != "" {
		ns, err := netns.GetFromPath(path)
		if err != nil {
			return fmt.Errorf("open network namespace %s: %w", path, err)
		}
		defer func() { _ = ns.Close() }()
		opts.Namespace = &ns
	}
	updates, done := make(chan netlink.LinkUpdate), make(chan struct{})
	if err := netlink.LinkSubscribeWithOptions(updates, done, opts); err != nil {
		close(done)
		return fmt.Errorf("subscribe to link events: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { close(done) })
	ready()
	for u := range updates {
		changed(u.Link)
	}
	if !stop() {
		return ctx.Err()
	}
	close(done)
	select {
	case err := <-lost:
		return fmt.Errorf("link events: %w", err)
	default:
		return errors.New("the subscription to link events ended")
	}
}
