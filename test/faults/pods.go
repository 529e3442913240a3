// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab"
)

const (
	// seenDir is where containers write down, as the first thing that they do, which interfaces they have.
	seenDir = "/run/faults-seen"
	// ifName is the name of every pod's device in the pod.
	ifName = "net0"
	// firstVLAN is that of the first of the VLANs. A pod in a VLAN asks by ARP for an address whose last byte is how far its
	// VLAN is from the one before.
	firstVLAN, staysVLAN = 1001, 1004
)

// netVF and netDummy are networks with addresses for VFs and dummies, and templates of claims that join them. There are few
// addresses more than devices, so that each is soon another's.
const (
	netVF, netDummy = "net-vf", "net-dummy"
	netVLAN         = 1005
)

var vlans = []int{firstVLAN, firstVLAN + 1, firstVLAN + 2, staysVLAN}

// kind is a kind of pod.
type kind struct {
	template string // vf, vfio, dummy, netVF or netDummy
	vlan     int
	shape    string
	// claim is the name of the claim that the pod shares with others, instead of one of its own.
	claim string
	// node is another node than the bench's.
	node *lab.Node
	// also is the template of one more claim.
	also string
}

// shapes are the kinds of containers that pods have: one that lists the claim; an init container and one, which both do and
// are not started again; a sidecar and one, which both do; and one that does not list it.
var shapes = []string{"plain", "once", "sidecar", "unlisted"}

// create makes a pod on the node.
func (b *bench) create(ctx context.Context, name string, k kind) error {
	node := b.node
	if k.node != nil {
		node = k.node
	}
	template := k.template
	work := "exec sleep 1000000"
	if template == "vf" {
		template = fmt.Sprintf("vf-%d", k.vlan)
		work = fmt.Sprintf("while :; do arping -q -c 1 -w 1 -I %s 192.0.2.%d >/dev/null 2>&1; sleep 0.5; done", ifName, k.vlan-firstVLAN+1)
	}
	// Globs and echo are the shell's own: this is the container's first instruction.
	look := "cd /sys/class/net && echo *"
	if template == "vfio" {
		look = "cd /dev/vfio && echo * | sed 's/[0-9][0-9]* vfio/" + ifName + "/'"
	}
	container := func(of, then string, lists bool) corev1.Container {
		c := corev1.Container{
			Name: of, Image: lab.TestImage, ImagePullPolicy: corev1.PullIfNotPresent,
			Command:      []string{"sh", "-c", fmt.Sprintf("{ %s; } >>/seen/%s.%s; %s", look, name, of, then)},
			VolumeMounts: []corev1.VolumeMount{{Name: "seen", MountPath: "/seen"}},
			// Whoever is privileged sees all devices of the node.
			SecurityContext: &corev1.SecurityContext{Privileged: ptr.To(template != "vfio")},
		}
		if lists {
			c.Resources.Claims = []corev1.ResourceClaim{{Name: "net"}}
		}
		return c
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeSelector:                  map[string]string{corev1.LabelHostname: node.Name()},
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			ResourceClaims:                []corev1.PodResourceClaim{{Name: "net"}},
			Volumes: []corev1.Volume{{Name: "seen", VolumeSource: corev1.VolumeSource{
				HostPath: &corev1.HostPathVolumeSource{Path: seenDir},
			}}},
			Containers: []corev1.Container{container("app", work, k.shape != "unlisted")},
		},
	}
	if k.claim != "" {
		pod.Spec.ResourceClaims[0].ResourceClaimName = &k.claim
	} else {
		pod.Spec.ResourceClaims[0].ResourceClaimTemplateName = &template
	}
	if k.also != "" {
		withAlso(pod, k.also)
	}
	switch k.shape {
	case "once":
		pod.Spec.RestartPolicy = corev1.RestartPolicyNever
		pod.Spec.InitContainers = []corev1.Container{container("init", "true", true)}
	case "sidecar":
		side := container("side", "exec sleep 1000000", true)
		side.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
		pod.Spec.InitContainers = []corev1.Container{side}
	}
	_, err := b.Client.CoreV1().Pods(b.ns).Create(ctx, pod, metav1.CreateOptions{})
	return err
}

// createAll makes pods of the kinds and returns their names.
func (b *bench) createAll(ctx context.Context, kinds ...kind) ([]string, error) {
	var names []string
	for _, k := range kinds {
		b.pods++
		name := fmt.Sprintf("p%d-%s-%s", b.pods, k.template, k.shape)
		if err := b.create(ctx, name, k); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, nil
}

// running waits until the pods run, each with its device.
func (b *bench) running(ctx context.Context, names ...string) error {
	if err := b.ready(ctx, names...); err != nil {
		return err
	}
	return b.eventually(ctx, "devices", func(ctx context.Context) string {
		for _, name := range names {
			if strings.Contains(name, "-vfio-") {
				continue // its containers have the device, or were not started
			}
			out, err := b.inPod(ctx, name, "ip -o link show up dev "+ifName)
			if err != nil {
				return err.Error()
			}
			if !strings.Contains(out, ifName) {
				return fmt.Sprintf("pod %s has no interface %s that is up: %s", name, ifName, out)
			}
		}
		return ""
	})
}

// ready waits until the pods run.
func (b *bench) ready(ctx context.Context, names ...string) error {
	return b.eventually(ctx, "pods", func(ctx context.Context) string {
		list, err := b.Client.CoreV1().Pods(b.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		waiting, first := 0, ""
		for _, p := range list.Items {
			ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
			})
			if !slices.Contains(names, p.Name) || p.Status.Phase == corev1.PodRunning && ready {
				continue
			}
			if waiting++; waiting == 1 {
				first = fmt.Sprintf("%s is %s and not Ready: %s", p.Name, p.Status.Phase, strings.Join(b.events(ctx, p), " | "))
			}
		}
		if waiting == 0 {
			return ""
		}
		return fmt.Sprintf("%d of %d do not run; %s", waiting, len(names), first)
	})
}

// events are the warnings about a pod.
func (b *bench) events(ctx context.Context, pod corev1.Pod) []string {
	list, err := b.Client.CoreV1().Events(b.ns).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(pod.UID) + ",type=Warning"})
	if err != nil {
		return []string{err.Error()}
	}
	var messages []string
	for _, e := range list.Items {
		messages = append(messages, e.Reason+": "+e.Message)
	}
	return messages
}

// inPod runs a script in the network namespace of the pod's first container.
func (b *bench) inPod(ctx context.Context, name, script string) (string, error) {
	pod, err := b.Client.CoreV1().Pods(b.ns).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	if len(pod.Status.ContainerStatuses) == 0 {
		return "", fmt.Errorf("pod %s has no container", name)
	}
	id := strings.TrimPrefix(pod.Status.ContainerStatuses[0].ContainerID, "containerd://")
	out, errOut, _, err := b.node.Exec(ctx, fmt.Sprintf(
		"nsenter -t $(cat /run/containerd/io.containerd.runtime.v2.task/k8s.io/%s/init.pid) -n sh -c '%s'", id, script))
	return strings.TrimSpace(out + errOut), err
}

// look returns what the pods that stay have: their device, with its index, and how often their containers were started.
func (b *bench) look(ctx context.Context) (string, error) {
	var all []string
	for _, name := range stays {
		pod, err := b.Client.CoreV1().Pods(b.ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		out, err := b.inPod(ctx, name, "ip -j link show dev "+ifName)
		if err != nil {
			return "", err
		}
		var links []struct {
			Index   int    `json:"ifindex"`
			Address string `json:"address"`
			MTU     int    `json:"mtu"`
		}
		if err := json.Unmarshal([]byte(out), &links); err != nil || len(links) != 1 {
			return "", fmt.Errorf("pod %s: %q: %w", name, out, err)
		}
		all = append(all, fmt.Sprintf("%s: %+v, %d restarts", name, links[0], pod.Status.ContainerStatuses[0].RestartCount))
	}
	return strings.Join(all, "; "), nil
}

// delete deletes pods with a time to end, in seconds, and waits until they are gone. Without any the API forgets them at once.
func (b *bench) delete(ctx context.Context, grace int64, names ...string) error {
	if err := b.deleteNow(ctx, grace, names...); err != nil {
		return err
	}
	return b.gone(ctx, names...)
}

func (b *bench) deleteNow(ctx context.Context, grace int64, names ...string) error {
	for _, name := range names {
		err := b.Client.CoreV1().Pods(b.ns).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &grace})
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

func (b *bench) gone(ctx context.Context, names ...string) error {
	return b.eventually(ctx, "pods", func(ctx context.Context) string {
		there := b.podNames(ctx)
		for _, name := range names {
			if slices.Contains(there, name) {
				return name + " is not gone"
			}
		}
		return ""
	})
}

func (b *bench) podNames(ctx context.Context) []string {
	list, err := b.Client.CoreV1().Pods(b.ns).List(ctx, metav1.ListOptions{})
	if err != nil {
		return []string{err.Error()} // nobody's name
	}
	var names []string
	for _, p := range list.Items {
		names = append(names, p.Name)
	}
	return names
}

// readSeen looks at what the node's containers wrote down, and forgets it. A container that lists its claim must have had the device
// from its first instruction on.
func (b *bench) readSeen(ctx context.Context, n *lab.Node) error {
	out, err := n.Run(ctx, "cd "+seenDir+" && { grep -Hs . * | grep -v ^stays-; for f in *; do case $f in stays-*) ;; *) rm -f $f;; esac; done; }; true")
	if err != nil {
		return err
	}
	return b.seen.read(out)
}

// containers are how many containers started, by the shape of their pods and their own names.
type containers map[string]starts

// starts are how many containers of a kind started, and how many of these without their device.
type starts struct{ All, Bare int }

// fileOf is the name of the file that a container writes.
var fileOf = regexp.MustCompile(`^p\d+-.+-(\w+)\.(\w+)$`)

// read counts starts, by lines of file and interfaces. Without its device only a container may start that does not list its claim.
func (c containers) read(lines string) error {
	var errs []error
	for line := range strings.Lines(lines) {
		file, links, _ := strings.Cut(strings.TrimSpace(line), ":")
		kind := "plain app"
		if m := fileOf.FindStringSubmatch(file); m != nil {
			kind = m[1] + " " + m[2]
		}
		s := c[kind]
		s.All++
		if !slices.Contains(strings.Fields(links), ifName) {
			s.Bare++
			if !strings.HasPrefix(kind, "unlisted ") {
				errs = append(errs, fmt.Errorf("container %s STARTED WITHOUT ITS DEVICE: it saw %s", file, links))
			}
		}
		c[kind] = s
	}
	return errors.Join(errs...)
}

// vfsAtHome are the names of the VFs that no pod has between rounds, by address.
func (b *bench) vfsAtHome() map[string]string {
	vfs := map[string]string{}
	for name, link := range b.before.Network.Links {
		if b.before.Drivers[link.Parent] != "" {
			vfs[link.MAC] = name
		}
	}
	return vfs
}

// strayFrames says which frames of the node have left where they must not: what a pod sends is in the pod's VLAN, and a VF at home
// sends nothing. VFs are the names of those at home, by address.
func strayFrames(frames []lab.Frame, node string, vfs map[string]string) error {
	wrong := map[string]int{}
	for _, f := range frames {
		if f.Node != node || !f.FromNode {
			continue
		}
		if f.EtherType == unix.ETH_P_ARP && len(f.Payload) >= 28 && string(f.Payload[24:27]) == "\xc0\x00\x02" {
			if want := firstVLAN - 1 + int(f.Payload[27]); f.VLAN != want {
				wrong[fmt.Sprintf("a frame of a pod in VLAN %d LEFT IN VLAN %d, from %s", want, f.VLAN, f.Src)]++
			}
			continue
		}
		if name, ok := vfs[f.Src.String()]; ok && f.VLAN == 0 {
			wrong[fmt.Sprintf("a frame of VF %s LEFT WITHOUT A VLAN, of type %#x to %s", name, f.EtherType, f.Dst)]++
		}
	}
	var errs []error
	for what, n := range wrong {
		errs = append(errs, fmt.Errorf("%s (%d times)", what, n))
	}
	return errors.Join(errs...)
}
