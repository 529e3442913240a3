// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Settings are what ethtool(8) sets of a NIC: by the name of each setting, the numbers that the driver has it as. A setting
// that is missing is not known, and stays as it is. The numbers mean something to the kernel that gave them only, so that
// they do not outlive a boot; and who could forge them could have a pod's settings last, so that they are kept where
// nobody but root writes.
type Settings map[string][]uint32

const (
	// maxNumbers bounds a setting. The largest, the table of receive queues, has 2,048 entries with the largest cards, and a
	// key.
	maxNumbers = 2200
	// maxSettings bounds how many there are.
	maxSettings = 64
)

// Validate refuses what was not read of a NIC. Settings that only other versions know are no error.
func (s Settings) Validate() error {
	if len(s) > maxSettings {
		return fmt.Errorf("%d settings are more than %d", len(s), maxSettings)
	}
	for _, name := range slices.Sorted(maps.Keys(s)) {
		if len(s[name]) > maxNumbers {
			return fmt.Errorf("%.64q: %d numbers are more than %d", name, len(s[name]), maxNumbers)
		}
	}
	return nil
}

// Settings reads a link's settings. One that the driver does not have is left out, and so is one that cannot be read, which
// is logged. Flow rules are not: a pod's could not be told from the host's.
func (p *Place) Settings(link netlink.Link) (Settings, error) {
	all, err := read(p.driverOf(link), link.Attrs().Name, p.log)
	if err != nil {
		return nil, err
	}
	if err := p.stillThere(link); err != nil {
		return nil, fmt.Errorf("%w while its settings were read", err)
	}
	return all, nil
}

func read(d driver, name string, log *slog.Logger) (Settings, error) {
	all := Settings{}
	for _, k := range settings {
		numbers, err := k.read(d)
		switch {
		case err == nil && len(numbers) <= maxNumbers:
			all[k.name] = numbers
		case isUnsupported(err) && k.essential:
			all[k.name] = []uint32{} // a pod may switch on what the driver does not have now
		case isUnsupported(err):
		case k.essential && err != nil:
			return nil, fmt.Errorf("read the %s of link %q: %w", k.name, name, err)
		case k.essential:
			return nil, fmt.Errorf("link %q has %d %s; at most %d can be told from what a pod adds", name, len(numbers), k.name, maxNumbers)
		default:
			log.Warn("A setting of a NIC cannot be read, and stays as a pod leaves it", "interface", name,
				"setting", k.name, "numbers", len(numbers), "error", err)
		}
	}
	return all, nil
}

// stillThere makes sure that the link's name, by which the driver was asked, leads to it.
func (p *Place) stillThere(link netlink.Link) error {
	attrs := link.Attrs()
	now, err := p.ByIndex(attrs.Index)
	if err == nil && (now == nil || now.Attrs().Name != attrs.Name) {
		err = fmt.Errorf("link %q was renamed or moved", attrs.Name)
	}
	return err
}

// PutBack gives a link that is home the settings that it had. It goes on after a failure with what else there is, and
// believes what the driver says afterwards. It can be repeated.
func (p *Place) PutBack(link netlink.Link, want Settings) error {
	if err := p.stillThere(link); err != nil {
		return err
	}
	driver := p.driverOf(link)
	var errs []error
	for _, k := range settings {
		if want, known := want[k.name]; known {
			if err := k.putBack(driver, want); err != nil {
				errs = append(errs, fmt.Errorf("put back the %s of link %q: %w", k.name, link.Attrs().Name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// driver makes an ethtool request of the driver of one link.
type driver func(data []byte) error

func (p *Place) driverOf(link netlink.Link) driver {
	name := link.Attrs().Name
	return func(data []byte) error { return p.Ethtool(name, data) }
}

// isUnsupported says whether a driver does not have what it was asked for. Some say that the request is invalid.
func isUnsupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL)
}

// setting is one kind of setting.
type setting struct {
	name string
	// essential is a setting without which a NIC is not lent.
	essential bool
	read      func(driver) ([]uint32, error)
	// write makes the setting, which is now that, what it was.
	write func(d driver, want, now []uint32) error
	// live, which may be nil, takes over from now what in want changes by itself, or cannot be changed.
	live func(want, now []uint32) []uint32
}

func (k setting) putBack(d driver, noted []uint32) error {
	now, err := k.read(d)
	if isUnsupported(err) {
		if k.essential && len(noted) > 0 {
			return fmt.Errorf("the driver has none any more, and the host had %s: %w", shorten(noted), err)
		}
		return nil // another driver, in which no pod can have left anything
	}
	if err != nil {
		return err
	}
	want := k.wantedNow(noted, now)
	if slices.Equal(want, now) {
		return nil
	}
	setErr := k.write(d, want, now)
	if now, err = k.read(d); err != nil {
		return err
	}
	if want = k.wantedNow(noted, now); slices.Equal(want, now) {
		return nil
	}
	if errors.Is(setErr, unix.EOPNOTSUPP) && !k.essential {
		return nil // nobody can set it, so that no pod has
	}
	return errors.Join(setErr, &differentError{want, now})
}

func (k setting) wantedNow(noted, now []uint32) []uint32 {
	if k.live == nil || len(noted) != len(now) {
		return noted
	}
	return k.live(slices.Clone(noted), now)
}

// differentError says that a setting is not what it was.
type differentError struct{ want, now []uint32 }

func (e *differentError) Error() string {
	return fmt.Sprintf("it is %s instead of %s", shorten(e.now), shorten(e.want))
}

// shorten is for people, who do not read thousands of numbers.
func shorten(numbers []uint32) string {
	const most = 24
	if len(numbers) <= most {
		return fmt.Sprint(numbers)
	}
	return fmt.Sprintf("%v and %d more", numbers[:most], len(numbers)-most)
}

// settings are in the order in which they are put back: what harms the next pod most comes first, and what another setting
// depends on comes before it.
var settings = []setting{
	flowRules,
	words("private flags", unix.ETHTOOL_GPFLAGS, unix.ETHTOOL_SPFLAGS, 1, 0),
	channels,
	words("ring sizes", unix.ETHTOOL_GRINGPARAM, unix.ETHTOOL_SRINGPARAM, 8, 4, 5, 6, 7),
	coalescing,
	hashing,
	hashFields,
	features,
	flowControl,
	words("message level", unix.ETHTOOL_GMSGLVL, unix.ETHTOOL_SMSGLVL, 1, 0),
}
