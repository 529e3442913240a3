// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"context"
	"errors"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/nicowner"
)

// own makes the plugin the owner of an attachment's NIC, before the attachment is recorded. The caller holds the NIC's lock.
func (c *call) own(r *record) error {
	_, err := c.owners.Claim(r.NIC.Key(), nicowner.Owner{
		Program: Name, For: "interface " + r.IfName + " of container " + r.ContainerID + ", network " + r.Network,
	})
	var taken *nicowner.TakenError
	switch {
	case errors.As(err, &taken):
		return errorf(types.ErrTryAgainLater, "%w", err)
	case err != nil:
		return errorf(types.ErrIOFailure, "%w", err)
	}
	return nil
}

// disown lets go of a NIC by its key, unless an attachment of such a NIC is recorded: the NICs of a device that has several
// have one key. The caller holds the NIC's lock.
func (c *call) disown(key string) error {
	recorded, err := c.isRecorded(key)
	if err != nil || recorded {
		return err
	}
	if err := c.owners.Release(key, Name); err != nil {
		return errorf(types.ErrIOFailure, "%w", err)
	}
	return nil
}

func (c *call) isRecorded(key string) (bool, error) {
	records, _, err := c.store.list()
	return slices.ContainsFunc(records, func(r *record) bool { return r.BootID == c.boot && r.NIC.Key() == key }), err
}

// disownUnrecorded lets go of what calls that were killed have left: a NIC is owned from before its attachment is
// recorded until after.
func (c *call) disownUnrecorded(ctx context.Context) error {
	keys, err := c.owners.Owned(Name)
	if err != nil {
		return errorf(types.ErrIOFailure, "%w", err)
	}
	for _, key := range keys {
		if recorded, err := c.isRecorded(key); err != nil {
			return err
		} else if recorded {
			continue
		}
		lock, err := c.store.lock(ctx, key)
		if err == nil {
			err = errors.Join(c.disown(key), lock.Close())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// forget ends the record of an attachment whose NIC is home, and the ownership of the NIC.
func (c *call) forget(r *record) error {
	if err := c.store.remove(r.attachment()); err != nil {
		return err
	}
	return c.disown(r.NIC.Key())
}

// refuseOwned says which other program has the NIC of a device, if one has.
func (c *call) refuseOwned(device string) error {
	key := nic.PCI(device).Key()
	owner, err := c.owners.Owner(key)
	switch {
	case err != nil:
		return errorf(types.ErrIOFailure, "%w", err)
	case owner != nil && owner.Program != Name:
		return errorf(types.ErrTryAgainLater, "%w", &nicowner.TakenError{Key: key, Owner: *owner})
	}
	return nil
}
